"""Prompts that are computed on one engine and continue on another: what is fetched ahead, and the room that is kept.

Used by `sending.py`. Synchronous. The pairs are in the route store; the engine that is to continue them is told by its
queue.

    begin ─▶ add, for each choice of the prompt ─▶ arrive, when it is sent there
                                               └─▶ drop, when it ended or goes elsewhere

An engine fetches a prompt ahead in the name of one of its sequences, and forgets that by itself when this sequence
arrives. So it is told to end (`EndFetch`) if that one does not come, but not before the others have.

What must always hold: room is kept for sequences that may still arrive, and for no others; what an engine was told to
fetch ends by the arrival of its sequence, by `EndFetch`, or with the engine.
"""

from __future__ import annotations

import attrs

from ..messages.peers import EndFetch, Fetch, Peer
from ..messages.scheduler import Submit
from .route_store import Pair, ReadyEngine, RouteStore
from .routing import Route


@attrs.frozen(eq=False, repr=False)
class PairedPrompts:
    _store: RouteStore

    def begin(self, prefill: ReadyEngine, decode: ReadyEngine) -> Pair:
        """Pair two engines for a prompt."""
        peer = Peer(prefill.engine_id, prefill.peer_address) if prefill.peer_address else None
        return Pair(decode.engine_id, peer)

    def add(self, pair: Pair, submit: Submit) -> None:
        """Keep room for a sequence where it is to continue, and have its prompt fetched unless it was for another.

        Another prompt that begins alike is not said to be cached there: it would not wait for what is being fetched.
        """
        engine, routing = self._store.engines[pair.decode_id], self._store.routing
        route = routing.follow(engine.slot, len(submit.prompt_token_ids))
        routing.on_first_token(route)  # it is going to run there
        pair.routes[submit.sequence_id] = route
        self._store.pairs[submit.sequence_id] = pair
        if (peer := pair.peer) is not None:
            pair.peer, pair.fetch_id = None, submit.sequence_id
            engine.queue.post(
                Fetch(submit.sequence_id, submit.prompt_token_ids, submit.root_key, submit.block_keys, peer)
            )

    def arrive(self, sequence_id: int) -> None:
        """Note that a sequence is sent to the engine that keeps room for it: it has the room now."""
        pair = self._store.pairs.pop(sequence_id)
        if pair.fetch_id == sequence_id:
            pair.fetch_id = None
        del pair.routes[sequence_id]
        self._end_fetch_if_over(pair)

    def drop(self, sequence_id: int) -> None:
        """Keep no room for a sequence any more."""
        pair = self._store.pairs.pop(sequence_id, None)
        if pair is None:
            return
        self._store.routing.drop(pair.routes.pop(sequence_id))
        self._end_fetch_if_over(pair)

    def dissolve(self, decode: ReadyEngine, *, is_alive: bool = True) -> None:
        """Forget what was to continue on an engine: it is sent nothing of it, and is told so if it is alive."""
        pairs = {id(pair): pair for pair in self._store.pairs.values() if pair.decode_id == decode.engine_id}
        for pair in pairs.values():
            pair.is_over = True
            if not is_alive:
                pair.fetch_id = None
            for sequence_id in list(pair.routes):
                self.drop(sequence_id)

    def routes_on(self, engine: ReadyEngine) -> list[Route]:
        """Return what keeps room on an engine."""
        return [
            pair.routes[sequence_id]
            for sequence_id, pair in self._store.pairs.items()
            if pair.decode_id == engine.engine_id
        ]

    def _end_fetch_if_over(self, pair: Pair) -> None:
        if pair.routes or pair.fetch_id is None:
            return
        if (engine := self._store.engines.get(pair.decode_id)) is not None:
            engine.queue.post(EndFetch(pair.fetch_id))
        pair.fetch_id = None
