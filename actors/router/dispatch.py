"""What becomes of each message of the router: prompts to engines' queues, reports into what is known of the engines.

Used by `actor.py`. Synchronous. All state is in the route store and the engines' queues.

Choices of one prompt go to one engine, and so do all sequences of a request while there is a single engine. A sequence
that is resumed is matched anew wherever it goes.

What must always hold: messages about one sequence reach its engine in the order in which they came; nothing is sent to
an engine that is not ready; no report of another incarnation than the present one counts.
"""

from __future__ import annotations

import attrs

from ..channel import Poster
from ..messages.accountant import Refused, Routed, StepReport
from ..messages.block_manager import LookUp
from ..messages.outcomes import ErrorKind, Fault, RequestError
from ..messages.peers import EndFetch, Fetch
from ..messages.router import EngineClosing, EngineDown, EngineUp, SequenceEnded
from ..messages.scheduler import Abort, ResetPrefixCache, Submit
from ..messages.tiers import Tier
from ..request_desk.engine_pool import EngineMessage, EnginePool
from ..request_desk.live_sequences import LiveSequences
from .key_index import DIGEST_BYTES
from .route_store import EngineNews, Group, ReadyEngine, RoutedSequence, RouteStore
from .routing import Route


class Dispatch:
    def __init__(
        self,
        store: RouteStore,
        pool: EnginePool,
        sequences: LiveSequences,
        accountant: Poster[Routed | Refused],
        *,
        resume_on: str,
    ) -> None:
        """`resume_on`: `same` to resume sequences only on engines that compute the same bits, `any` to prefer those."""
        self._store = store
        self._routing = store.routing
        self._pool = pool
        self._sequences = sequences
        self._accountant = accountant
        self._only_same = resume_on == "same"

    # ------------------------------------------------------------ engines

    def handle_news(self, news: EngineNews) -> None:
        match news:
            case StepReport():
                self._on_report(news)
            case SequenceEnded(sequence_id):
                self._drop(sequence_id)
            case EngineUp():
                self._on_up(news)
            case EngineDown():
                self._on_down(news)
            case EngineClosing(engine_id):
                if (engine := self._store.engines.get(engine_id)) is not None and not engine.is_closing:
                    engine.is_closing = True
                    self._routing.close_engine(engine.slot)
                    self._take_back_queue(engine)

    def _on_up(self, up: EngineUp) -> None:
        if up.engine_id in self._store.engines:
            self._forget(up.engine_id)
        if up.engine_id not in self._pool:
            return  # it was removed since
        slot = self._routing.add_engine(up.num_blocks, up.numerics)
        engine = ReadyEngine(up.engine_id, up.incarnation, slot, up.numerics, self._pool[up.engine_id].queue)
        self._store.engines[up.engine_id] = self._store.by_slot[slot] = engine
        self.dispatch_waiting()

    def _on_down(self, down: EngineDown) -> None:
        engine = self._store.engines.get(down.engine_id)
        if engine is not None and engine.incarnation == down.incarnation:
            self._forget(down.engine_id)
            self._take_back_queue(engine)
        if self._only_same:
            self.dispatch_waiting()  # some may wait for engines that will not come again

    def _forget(self, engine_id: int) -> None:
        """Forget an engine that is gone, and everything that was sent to it."""
        for sequence_id in [i for i, its in self._store.sequences.items() if its.engine_id == engine_id]:
            self._drop(sequence_id)
        self._store.groups = {i: group for i, group in self._store.groups.items() if group.engine_id != engine_id}
        slot = self._store.engines.pop(engine_id).slot
        del self._store.by_slot[slot]
        self._routing.remove_engine(slot)

    def _take_back_queue(self, engine: ReadyEngine) -> None:
        """Route again what an engine has not taken, and announce to it that nothing more comes."""
        engine_id, queue, store = engine.engine_id, engine.queue, self._store
        again: list[EngineMessage] = []
        for message in queue.take_nowait():
            is_held = isinstance(message, Abort) and message.sequence_id in store.sequences
            if is_held or isinstance(message, ResetPrefixCache):
                queue.post(message)
                continue
            if isinstance(message, Fetch | EndFetch):
                continue  # a hint, which the engine that is chosen next gets anew
            if isinstance(message, Submit):
                self._drop(message.sequence_id)
            again.append(message)
        for group_id in [i for i, group in store.groups.items() if group.engine_id == engine_id]:
            if store.groups.pop(group_id).num_to_come and engine_id in store.engines:
                queue.post(Abort(group_id, ends_group=True))
        self._sequences.note_released()
        for message in again:
            self.handle_prompt(message)

    # ------------------------------------------------------------ reports

    def _on_report(self, report: StepReport) -> None:
        store, routing = self._store, self._routing
        engine = store.engines.get(report.engine_id)
        if engine is None or engine.incarnation != report.incarnation or report.number <= engine.num_reports:
            return
        # keys may be applied twice, but not left out: the number is noted after them
        if report.is_cleared:
            self._clear(engine)
        if report.removed_keys:
            routing.on_removed(engine.slot, _cut(report.removed_keys))
        if report.stored_keys:
            routing.on_stored(engine.slot, _cut(report.stored_keys))
        if report.lowered_keys or report.raised_keys:
            lowered = {Tier(tier): _cut(keys) for tier, keys in report.lowered_keys.items()}
            routing.on_moved(engine.slot, lowered, _cut(report.raised_keys))
        if report.shared_keys or report.unshared_keys:
            routing.shared.add(engine.slot, _cut(report.shared_keys))
            routing.shared.discard(engine.slot, _cut(report.unshared_keys))
        engine.num_reports = report.number
        if store.prefilling:
            self._note_prefills(report)

    def _note_prefills(self, report: StepReport) -> None:
        prefilling, routing = self._store.prefilling, self._routing
        # the accountant reports columns of unequal lengths; here the rest is ignored
        for sequence_id, number, cached in zip(
            report.admitted_ids, report.admitted_number, report.admitted_reused, strict=False
        ):
            if number == 1 and (its := prefilling.get(sequence_id)) is not None:
                routing.on_admitted(its.route, its.num_prompt_tokens - cached)
        for sequence_id, start, end in zip(report.span_ids, report.span_starts, report.span_ends, strict=False):
            if (its := prefilling.get(sequence_id)) is not None:
                routing.on_computed(its.route, max(0, min(end, its.num_prompt_tokens) - start))
        for sequence_id in report.token_sequence_ids:
            if (its := prefilling.pop(sequence_id, None)) is not None:
                its.is_prefilling = False
                routing.on_first_token(its.route)

    def _clear(self, engine: ReadyEngine) -> None:
        by_slot, sequences = self._store.by_slot, self._store.sequences.values()
        del by_slot[engine.slot]
        routes = [its.route for its in sequences if its.engine_id == engine.engine_id]
        engine.slot = self._routing.empty_engine(engine.slot, routes)
        by_slot[engine.slot] = engine

    # ------------------------------------------------------------ prompts

    def handle_prompt(self, message: EngineMessage) -> None:
        """Send a message to the engine that it is for, or keep it until one is ready."""
        match message:
            case ResetPrefixCache():
                for engine in self._pool:
                    engine.queue.post(message)
            case LookUp():
                self._look_up(message)
            case Abort():
                self._abort(message)
            case Submit():
                if not self._submit(message):
                    waiting = self._store.unrouted_resumed if message.is_resumed else self._store.unrouted
                    waiting[message.sequence_id] = message

    def _look_up(self, question: LookUp) -> None:
        """Ask the engine that a sequence with this prompt would be sent to. Nothing is noted."""
        store, keys = self._store, question.block_keys if question.reads_cache else []
        if not self._routing.has_engines or store.is_to_be_careful:
            self._sequences.lookups.refuse(question)
            return
        slot = self._routing.preview(keys, len(question.prompt_token_ids), question.affinity or None)
        store.by_slot[slot].queue.post(self._routing.shared.hinted(question, slot))

    def _abort(self, abort: Abort) -> None:
        store, sequence_id = self._store, abort.sequence_id
        if abort.ends_group:
            if (group := store.groups.get(sequence_id)) is not None:
                group.num_to_come = 0
                self._end_group_if_over(sequence_id, group)
                store.engines[group.engine_id].queue.post(abort)
        elif (its := store.sequences.get(sequence_id)) is not None:
            store.engines[its.engine_id].queue.post(abort)
        else:
            for waiting in (store.unrouted_resumed, store.unrouted):
                if (submit := waiting.pop(sequence_id, None)) is not None:
                    _announce_less(waiting, submit)
                    self._sequences.on_unsent(sequence_id)

    def dispatch_waiting(self) -> None:
        """Send what has waited for an engine."""
        store = self._store
        for message in (*store.unrouted_resumed.values(), *store.unrouted.values()):
            if self._submit(message):
                del (store.unrouted_resumed if message.is_resumed else store.unrouted)[message.sequence_id]

    def _submit(self, submit: Submit) -> bool:
        """Send a sequence to an engine; return False if none may have it now."""
        store = self._store
        self._drop(submit.sequence_id)  # it was handed over
        group = store.groups.get(submit.group_id) if submit.group_id else None
        is_first = group is None
        if group is None:
            route = self._choose(submit)
            if route is None:
                return False
            group = Group(store.by_slot[route.slot].engine_id)
            if submit.group_id:
                store.groups[submit.group_id] = group
        else:
            route = self._routing.follow(store.engines[group.engine_id].slot, len(submit.prompt_token_ids))
        group.num_routed += 1
        group.num_to_come = submit.num_to_come
        num_tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
        routed = RoutedSequence(group.engine_id, num_tokens, submit.group_id, route)
        store.sequences[submit.sequence_id] = store.prefilling[submit.sequence_id] = routed
        if is_first and self._pool.was_ever_several:
            self._accountant.post(Routed(submit.sequence_id, group.engine_id, route.num_overlapping))
        engine = store.engines[group.engine_id]
        engine.queue.post(submit if store.is_to_be_careful else self._routing.shared.hinted(submit, engine.slot))
        return True

    def _choose(self, submit: Submit) -> Route | None:
        """Return the route of a prompt, None if no engine may have it now."""
        routing = self._routing
        slots = self._slots_to_resume_on(submit) if submit.is_resumed else None
        if not (slots if slots is not None else routing.has_engines):
            return None
        num_tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
        if self._store.is_to_be_careful:
            return routing.follow((slots or routing.slots)[0], num_tokens)
        keys = submit.block_keys if submit.reads_cache else []
        return routing.route(keys, num_tokens, submit.affinity or None, slots=slots)

    def _slots_to_resume_on(self, submit: Submit) -> list[int] | None:
        """Return the engines that a sequence may be resumed on; None: any that prompts may be sent to."""
        live = self._sequences.find(submit.sequence_id)
        if live is None or (numerics := live.numerics) is None:
            return None
        engines = self._store.engines.values()
        same = [engine.slot for engine in engines if engine.numerics == numerics and not engine.is_closing]
        if self._only_same and not same and not self._may_come(numerics):
            error = RequestError(ErrorKind.INTERNAL, "Its engine died, and no other computes the same bits.")
            self._accountant.post(Refused(live.request_id, error, Fault.ENGINE_DIED))
        return same if same or self._only_same else None

    def _may_come(self, numerics: str) -> bool:
        """Whether an engine that computed these bits may be ready again."""
        return any(e.is_wanted and e.ready is not None and e.ready.numerics == numerics for e in self._pool)

    def _drop(self, sequence_id: int) -> None:
        """Forget a sequence that its engine has ended, or will not have."""
        its = self._store.sequences.get(sequence_id)
        if its is None:
            return
        self._routing.drop(its.route)
        del self._store.sequences[sequence_id]
        self._store.prefilling.pop(sequence_id, None)
        if (group := self._store.groups.get(its.group_id)) is not None and group.engine_id == its.engine_id:
            group.num_routed -= 1
            self._end_group_if_over(its.group_id, group)

    def _end_group_if_over(self, group_id: int, group: Group) -> None:
        if group.num_routed <= 0 and not group.num_to_come:
            self._store.groups.pop(group_id, None)


def _announce_less(waiting: dict[int, Submit], gone: Submit) -> None:
    """Stop earlier sequences of a group from announcing one that is gone."""
    if gone.group_id:
        for sequence_id, other in waiting.items():
            if other.group_id == gone.group_id and other.num_to_come > gone.num_to_come:
                num_tokens = other.tokens_to_come - len(gone.prompt_token_ids)
                waiting[sequence_id] = attrs.evolve(other, num_to_come=other.num_to_come - 1, tokens_to_come=num_tokens)


def _cut(keys: bytes) -> list[bytes]:
    return [keys[at : at + DIGEST_BYTES] for at in range(0, len(keys) - DIGEST_BYTES + 1, DIGEST_BYTES)]
