"""Where a sequence may be resumed that another engine has held, and from which engine its blocks may be fetched.

Used by `dispatch.py`. Synchronous.

What must always hold: a sequence is resumed on an engine that computes the same bits as its last one, if there is one;
blocks are fetched only from an engine that is ready in the incarnation that has computed them.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs
import numpy as np

from ..channel import Poster
from ..messages.accountant import Refused, Routed
from ..messages.outcomes import ErrorKind, Fault, RequestError
from ..messages.peers import Peer
from ..messages.scheduler import Submit
from ..request_desk.engine_pool import EnginePool
from ..request_desk.live_sequences import LiveSequences
from .overlaps import raise_to
from .route_store import ReadyEngine, RouteStore


@attrs.frozen(eq=False, repr=False)
class Resuming:
    _store: RouteStore
    _pool: EnginePool
    _sequences: LiveSequences
    _accountant: Poster[Routed | Refused]
    _only_same: bool = attrs.field(kw_only=True)
    """Resume sequences only on engines that compute the same bits; else on these if there are any."""

    def slots_for(self, submit: Submit) -> list[int] | None:
        """Return the engines that a sequence may be resumed on; None: any that prompts may be sent to.

        Its request fails if there is none, and none will come.
        """
        live = self._sequences.find(submit.sequence_id)
        if live is None or (numerics := live.numerics) is None:
            return None
        same = [engine.slot for engine in self._store.open_engines() if engine.numerics == numerics]
        if live.goes_to and (wanted := self._slots_of(live.goes_to, same)):
            return wanted
        if self._only_same and not same and not self._may_come(numerics):
            error = RequestError(ErrorKind.INTERNAL, "Its engine died, and no other computes the same bits.")
            self._accountant.post(Refused(live.request_id, error, Fault.ENGINE_DIED))
        return same if same or self._only_same else None

    def is_sent_elsewhere(self, submit: Submit) -> bool:
        """Whether an operator has moved a sequence, which then goes alone, without others of its group."""
        live = self._sequences.find(submit.sequence_id)
        return live is not None and bool(live.goes_to)

    def _slots_of(self, engine_ids: Collection[int], among: Collection[int]) -> list[int]:
        engines = (self._store.engines.get(engine_id) for engine_id in engine_ids)
        return [engine.slot for engine in engines if engine is not None and engine.slot in among]

    def _may_come(self, numerics: str) -> bool:
        """Whether an engine that computed these bits may be ready again."""
        return any(e.is_wanted and e.ready is not None and e.ready.numerics == numerics for e in self._pool)

    def peer_for(self, submit: Submit, engine: ReadyEngine) -> Peer | None:
        """Return from where an engine may fetch the blocks of a sequence that it resumes.

        That is the engine that it has left or, if that is gone, the one that has cached most of its prompt.
        """
        live = self._sequences.find(submit.sequence_id)
        if live is None:
            return None
        if (former := live.former) is not None:
            holder = self._store.engines.get(former.peer.engine_id)
            if holder is not None and holder.incarnation == former.incarnation:
                return None if holder is engine else former.peer
        # without output it may not have been admitted yet, and its first admission tells what is cached
        return self._best_holder(submit, engine) if submit.output_token_ids else None

    def _best_holder(self, submit: Submit, engine: ReadyEngine) -> Peer | None:
        """Return the engine that has cached most of a prompt, if that is more than `engine` has."""
        if not submit.block_keys or self._store.is_to_be_careful:
            return None
        routing = self._store.routing
        cached = np.zeros(len(routing.loads.in_use))
        raise_to(cached, routing.index.match(submit.block_keys))
        holders = [
            other
            for other in self._store.engines.values()
            if other.peer_address and other.numerics == engine.numerics and cached[other.slot] > cached[engine.slot]
        ]
        best = max(holders, key=lambda other: cached[other.slot], default=None)
        return None if best is None else Peer(best.engine_id, best.peer_address)
