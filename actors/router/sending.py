"""Which engine gets a sequence, and what is noted of that: new prompts, their choices, and sequences that are resumed.

Used by `dispatch.py`. Synchronous. All state is in the route store and the engines' queues.

Choices of one prompt go to one engine, and so do all sequences of a request while there is a single engine. A sequence
that is resumed is matched anew wherever it goes. Where engines have roles, a prompt may be computed on one engine and
continue on another (`pairs.py`): the first one ends it with its first token, and it comes back to be resumed.

What must always hold: a sequence is sent only to an engine that is ready and not closing, except for choices of prompts
that it has; what is noted of a sequence is forgotten when it has ended. A route is noted as soon as it is made, and a
sequence is put into a queue last: so it is sent once, and counted once, wherever the router dies.
"""

from __future__ import annotations

import attrs

from ..channel import Poster
from ..messages.accountant import Refused, Routed
from ..messages.scheduler import Submit
from ..request_desk.engine_pool import EnginePool
from .paired_prompts import PairedPrompts
from .pairs import PairPolicy, Plan, continues, stays
from .resuming import Resuming
from .route_store import Group, Pair, ReadyEngine, RoutedSequence, RouteStore
from .routing import Route


@attrs.frozen(eq=False, repr=False)
class Sending:
    _store: RouteStore
    _pool: EnginePool
    _accountant: Poster[Routed | Refused]
    _resuming: Resuming
    _pairs: PairedPrompts
    _policy: PairPolicy

    def submit(self, submit: Submit) -> bool:
        """Send a sequence to an engine; return False if none may have it now."""
        store = self._store
        self.drop_route(submit.sequence_id)  # it was handed over
        if submit.is_resumed and (store.is_apart or self._resuming.is_sent_elsewhere(submit)):
            submit = attrs.evolve(submit, num_to_come=0, tokens_to_come=0)  # those of its group may go elsewhere
            if submit.output_token_ids:
                return self._continue(submit)
        self._pairs.drop(submit.sequence_id)
        group = store.groups.get(submit.group_id) if submit.group_id else None
        is_first = group is None
        if group is None:
            chosen = self._choose(submit)
            if chosen is None:
                return False
            route, decode = chosen
            engine = store.by_slot[route.slot]
            group = Group(engine.engine_id)
            if decode is not None and not stays(engine, decode):
                group.pair = self._pairs.begin(engine, decode)
            if submit.group_id:
                store.groups[submit.group_id] = group
        else:
            engine = store.engines[group.engine_id]
            route = self._store.routing.follow(engine.slot, len(submit.prompt_token_ids))
            if group.pair is not None and group.pair.is_over:
                group.pair = self._pair_again(engine, submit)
        group.num_routed += 1
        group.num_to_come = submit.num_to_come
        self._note(submit, engine, route)
        if is_first and self._pool.was_ever_several:
            self._accountant.post(Routed(submit.sequence_id, group.engine_id, route.num_overlapping))
        pair = None if store.is_to_be_careful else group.pair
        if pair is not None:
            self._pairs.add(pair, submit)
        self._post(submit, engine, ends_after_prefill=pair is not None)
        return True

    def _continue(self, submit: Submit) -> bool:
        """Send a sequence whose prompt was computed to an engine of the decode side; return False if there is none."""
        store, sequence_id = self._store, submit.sequence_id
        slots = self._resuming.slots_for(submit)
        engines = [engine for engine in store.open_engines() if slots is None or engine.slot in slots]
        if not engines:
            return False
        submit = attrs.evolve(submit, group_id=0)
        pair = store.pairs.get(sequence_id)
        engine = None if pair is None else store.engines.get(pair.decode_id)
        if pair is not None and engine is not None and engine in engines:
            self._note(submit, engine, pair.routes[sequence_id])
            self._pairs.arrive(sequence_id)
            self._post(submit, engine)
            return True
        self._pairs.drop(sequence_id)
        decoders = [engine for engine in engines if engine.role.may_decode]
        num_tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
        if store.is_to_be_careful:
            engine = (decoders or engines)[0]
            route = self._store.routing.follow(engine.slot, num_tokens)
        else:
            keys = submit.block_keys if submit.reads_cache else []
            engine = self._policy.choose_decode(decoders or engines, keys, num_tokens)
            route = self._store.routing.route(keys, num_tokens, slots=[engine.slot])
        self._note(submit, engine, route)
        self._post(submit, engine)
        return True

    def _note(self, submit: Submit, engine: ReadyEngine, route: Route) -> None:
        """Note which engine a sequence is sent to."""
        num_tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
        routed = RoutedSequence(engine.engine_id, num_tokens, submit.group_id, route)
        self._store.sequences[submit.sequence_id] = self._store.prefilling[submit.sequence_id] = routed

    def _post(self, submit: Submit, engine: ReadyEngine, *, ends_after_prefill: bool = False) -> None:
        """Put a sequence into an engine's queue."""
        store = self._store
        peer = self._resuming.peer_for(submit, engine) if submit.is_resumed else None
        if submit.ends_after_prefill is not ends_after_prefill or submit.peer != peer:
            submit = attrs.evolve(submit, ends_after_prefill=ends_after_prefill, peer=peer)
        engine.queue.post(submit if store.is_to_be_careful else store.routing.shared.hinted(submit, engine.slot))

    def _choose(self, submit: Submit) -> tuple[Route, ReadyEngine | None] | None:
        """Return the route of a prompt and where it continues if not there; None if no engine may have it now."""
        store, routing = self._store, self._store.routing
        slots = self._resuming.slots_for(submit) if submit.is_resumed else None
        if not (slots if slots is not None else routing.has_engines):
            return None
        num_tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
        if store.is_to_be_careful:
            return routing.follow((slots or routing.slots)[0], num_tokens), None
        plan = Plan(slots)
        if store.is_apart:
            engines = [engine for engine in store.open_engines() if slots is None or engine.slot in slots]
            plan = self._policy.plan(
                engines,
                submit.block_keys,
                num_tokens,
                reads_cache=submit.reads_cache,
                continues=continues(submit),
            )
        keys = submit.block_keys if submit.reads_cache else []
        return routing.route(keys, num_tokens, submit.affinity or None, slots=plan.slots), plan.decode

    def _pair_again(self, prefill: ReadyEngine, submit: Submit) -> Pair | None:
        """Pair an engine that computes a prompt with another one than that on which the prompt was to continue."""
        engines = [engine for engine in self._store.open_engines() if engine.role.may_decode]
        engines = [engine for engine in engines if engine.numerics == prefill.numerics and not stays(prefill, engine)]
        if not engines:
            return None
        decode = self._policy.choose_decode(engines, submit.block_keys, len(submit.prompt_token_ids))
        return self._pairs.begin(prefill, decode)

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence that has ended, or that its engine will not have."""
        self.drop_route(sequence_id)
        self._pairs.drop(sequence_id)

    def drop_route(self, sequence_id: int) -> None:
        """Forget where a sequence was sent."""
        its = self._store.sequences.get(sequence_id)
        if its is None:
            return
        self._store.routing.drop(its.route)
        del self._store.sequences[sequence_id]
        self._store.prefilling.pop(sequence_id, None)
        if (group := self._store.groups.get(its.group_id)) is not None and group.engine_id == its.engine_id:
            group.num_routed -= 1
            self.end_group_if_over(its.group_id, group)

    def end_group_if_over(self, group_id: int, group: Group) -> None:
        if group.num_routed <= 0 and not group.num_to_come:
            self._store.groups.pop(group_id, None)
