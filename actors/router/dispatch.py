"""What becomes of each message of the router: prompts to engines' queues, reports into what is known of the engines.

Used by `actor.py`. Synchronous. All state is in the route store and the engines' queues.

Which engine gets a sequence is decided in `sending.py`.

What must always hold: messages about one sequence reach its engine in the order in which they came; nothing is sent to
an engine that is not ready; no report of another incarnation than the present one counts.
"""

from __future__ import annotations

import attrs

from ..channel import Poster
from ..messages.accountant import Refused, Routed, StepReport
from ..messages.block_manager import LookUp
from ..messages.engine_adapters import KeepAdapters, LoadAdapter, UnloadAdapter
from ..messages.peers import EndFetch, Fetch
from ..messages.router import EngineClosing, EngineDown, EngineUp, RoleChanged, SequenceEnded
from ..messages.scheduler import Abort, ResetPrefixCache, Submit
from ..messages.tiers import Tier
from ..request_desk.engine_pool import EnginePool, SequenceMessage
from ..request_desk.live_sequences import LiveSequences
from .key_index import DIGEST_BYTES
from .paired_prompts import PairedPrompts
from .pairs import PairPolicy, Plan
from .resuming import Resuming
from .route_store import EngineNews, ReadyEngine, RouteStore
from .sending import Sending


class Dispatch:
    def __init__(
        self,
        store: RouteStore,
        pool: EnginePool,
        sequences: LiveSequences,
        accountant: Poster[Routed | Refused],
        resume_on: str,
        prefill_local_tokens: int = 0,
    ) -> None:
        """`resume_on`: `same` to resume sequences only on engines that compute the same bits, `any` to prefer those.

        `prefill_local_tokens`: tokens of a prompt that an engine for decoding computes itself.
        """
        self._store = store
        self._routing = store.routing
        self._pool = pool
        self._sequences = sequences
        self._only_same = resume_on == "same"
        resuming = Resuming(store, pool, sequences, accountant, only_same=self._only_same)
        self._pairs = PairedPrompts(store)
        self._policy = PairPolicy(store.routing, prefill_local_tokens)
        self._sending = Sending(store, pool, accountant, resuming, self._pairs, self._policy)

    # ------------------------------------------------------------ engines

    def handle_news(self, news: EngineNews) -> None:
        match news:
            case StepReport():
                self._on_report(news)
            case SequenceEnded(sequence_id):
                self._sending.drop(sequence_id)
            case EngineUp():
                self._on_up(news)
            case EngineDown():
                self._on_down(news)
            case EngineClosing(engine_id):
                if (engine := self._store.engines.get(engine_id)) is not None and not engine.is_closing:
                    engine.is_closing = True
                    self._pairs.dissolve(engine)
                    self._routing.close_engine(engine.slot)
                    self._take_back_queue(engine)
            case RoleChanged(engine_id, role):
                if (engine := self._store.engines.get(engine_id)) is not None:
                    engine.role = role
                    if not role.may_decode:
                        self._pairs.dissolve(engine)
                self._store.note_roles()

    def _on_up(self, up: EngineUp) -> None:
        if up.engine_id in self._store.engines:
            self._forget(up.engine_id)
        if up.engine_id not in self._pool:
            return  # it was removed since
        slot = self._routing.add_engine(up.num_blocks, up.numerics)
        queue = self._pool[up.engine_id].queue
        engine = ReadyEngine(up.engine_id, up.incarnation, slot, up.numerics, queue, up.role, up.peer_address)
        self._store.engines[up.engine_id] = self._store.by_slot[slot] = engine
        self._store.note_roles()
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
            self._sending.drop_route(sequence_id)
        self._pairs.dissolve(self._store.engines[engine_id], is_alive=False)
        self._store.groups = {i: group for i, group in self._store.groups.items() if group.engine_id != engine_id}
        slot = self._store.engines.pop(engine_id).slot
        del self._store.by_slot[slot]
        self._routing.remove_engine(slot)
        self._store.note_roles()

    def _take_back_queue(self, engine: ReadyEngine) -> None:
        """Route again what an engine has not taken, and announce to it that nothing more comes."""
        engine_id, queue, store = engine.engine_id, engine.queue, self._store
        again: list[SequenceMessage] = []
        not_fetched: set[int] = set()
        for message in queue.take_nowait():
            if isinstance(message, Fetch):
                not_fetched.add(message.sequence_id)
                continue
            if isinstance(message, KeepAdapters | LoadAdapter | UnloadAdapter):
                if engine_id in store.engines:
                    queue.post(message)
                continue
            if isinstance(message, EndFetch):
                if engine_id in store.engines and message.sequence_id not in not_fetched:
                    queue.post(message)
                continue
            is_held = isinstance(message, Abort) and message.sequence_id in store.sequences
            if is_held or isinstance(message, ResetPrefixCache):
                queue.post(message)
                continue
            if self._is_of_hand_over(message):
                continue
            if isinstance(message, Submit):
                self._sending.drop(message.sequence_id)
            again.append(message)
        for group_id in [i for i, group in store.groups.items() if group.engine_id == engine_id]:
            if store.groups.pop(group_id).num_to_come and engine_id in store.engines:
                queue.post(Abort(group_id, ends_group=True))
        self._sequences.note_released()
        for message in again:
            self.handle_prompt(message)

    def _is_of_hand_over(self, message: SequenceMessage) -> bool:
        """Whether a message was to have its engine alone end a sequence, which by now goes on elsewhere."""
        if not isinstance(message, Abort) or message.ends_group:
            return False
        live = self._sequences.find(message.sequence_id)
        return live is not None and not live.aborted

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
            its = prefilling.get(sequence_id)
            if number == 1 and its is not None and its.engine_id == report.engine_id:
                routing.on_admitted(its.route, its.num_prompt_tokens - cached)
        for sequence_id, start, end in zip(report.span_ids, report.span_starts, report.span_ends, strict=False):
            its = prefilling.get(sequence_id)
            if its is not None and its.engine_id == report.engine_id:
                routing.on_computed(its.route, max(0, min(end, its.num_prompt_tokens) - start))
        for sequence_id in report.token_sequence_ids:
            its = prefilling.get(sequence_id)
            if its is not None and its.engine_id == report.engine_id:
                del prefilling[sequence_id]
                routing.on_first_token(its.route)

    def _clear(self, engine: ReadyEngine) -> None:
        by_slot, sequences = self._store.by_slot, self._store.sequences.values()
        del by_slot[engine.slot]
        routes = [its.route for its in sequences if its.engine_id == engine.engine_id]
        engine.slot = self._routing.empty_engine(engine.slot, routes + self._pairs.routes_on(engine))
        by_slot[engine.slot] = engine

    # ------------------------------------------------------------ prompts

    def handle_prompt(self, message: SequenceMessage) -> None:
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
                if not self._sending.submit(message):
                    waiting = self._store.unrouted_resumed if message.is_resumed else self._store.unrouted
                    waiting[message.sequence_id] = message

    def _look_up(self, question: LookUp) -> None:
        """Ask the engine that a sequence with this prompt would be sent to. Nothing is noted."""
        store, keys = self._store, question.block_keys if question.reads_cache else []
        if not self._routing.has_engines or store.is_to_be_careful:
            self._sequences.lookups.refuse(question)
            return
        num_tokens, plan = len(question.prompt_token_ids), Plan(None)
        if store.is_apart:
            plan = self._policy.plan(
                store.open_engines(), question.block_keys, num_tokens, reads_cache=question.reads_cache
            )
        slot = self._routing.preview(keys, num_tokens, question.affinity or None, slots=plan.slots)
        store.by_slot[slot].queue.post(self._routing.shared.hinted(question, slot))

    def _abort(self, abort: Abort) -> None:
        store, sequence_id = self._store, abort.sequence_id
        if abort.ends_group:
            if (group := store.groups.get(sequence_id)) is not None:
                group.num_to_come = 0
                self._sending.end_group_if_over(sequence_id, group)
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
            if self._sending.submit(message):
                del (store.unrouted_resumed if message.is_resumed else store.unrouted)[message.sequence_id]


def _announce_less(waiting: dict[int, Submit], gone: Submit) -> None:
    """Stop earlier sequences of a group from announcing one that is gone."""
    if gone.group_id:
        for sequence_id, other in waiting.items():
            if other.group_id == gone.group_id and other.num_to_come > gone.num_to_come:
                num_tokens = other.tokens_to_come - len(gone.prompt_token_ids)
                waiting[sequence_id] = attrs.evolve(other, num_to_come=other.num_to_come - 1, tokens_to_come=num_tokens)


def _cut(keys: bytes) -> list[bytes]:
    return [keys[at : at + DIGEST_BYTES] for at in range(0, len(keys) - DIGEST_BYTES + 1, DIGEST_BYTES)]
