"""The choice of the engines that a prompt needs, where some are for computing prompts and others for continuing them.

Used by `dispatch.py`. Pure: it notes nothing. The engine that will continue a prompt is chosen first, by what it has to
do and what it has cached; then the one that computes it, by the policy for all prompts.

    nobody has a role, or one side has no engine           any engine, which does everything
    there is nothing to continue (one token, an embedding) one for prefill or a mixed one, which does everything
    the decode side has nearly all of it cached            that one, which computes the rest itself
    else                                                   one for prefill or a mixed one, then that of the decode side

What must always hold: two engines share a prompt only if they compute the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from ..config.engine_roles import EngineRole, are_apart
from ..messages.scheduler import SequenceKind, Submit
from .route_store import ReadyEngine
from .routing import Routing

RUNNING_BLOCKS: Final = 8
"""Cached blocks that a running sequence costs as much as: its row of each step, and the memory of its outputs."""


@attrs.frozen(eq=False)
class Plan:
    """Where a prompt may go."""

    slots: Sequence[int] | None
    """Those of which the routing policy chooses one. None: all."""
    decode: ReadyEngine | None = None
    """Where its sequences continue, unless they may as well stay."""


@attrs.frozen(eq=False, repr=False)
class PairPolicy:
    routing: Routing
    local_tokens: int
    """Tokens of a prompt that the decode side computes itself."""

    def plan(
        self,
        engines: Iterable[ReadyEngine],
        keys: Sequence[bytes],
        num_tokens: int,
        *,
        reads_cache: bool = True,
        continues: bool = True,
    ) -> Plan:
        """Return where a prompt may go among these engines, to all of which prompts may be sent.

        `keys` are those of its full blocks, whether or not it reads them. `continues`: there is more to do than to
        compute it.
        """
        engines = list(engines)
        decoders = [engine for engine in engines if engine.role.may_decode]
        prefillers = [engine for engine in engines if engine.role.may_prefill]
        if not decoders or not prefillers or not are_apart(engine.role for engine in engines):
            return Plan([engine.slot for engine in engines])
        if not continues:
            return Plan([engine.slot for engine in prefillers])
        decode = self.choose_decode(decoders, keys, num_tokens)
        if self._is_local(decode, keys, num_tokens, reads_cache=reads_cache):
            return Plan([decode.slot])
        same = [engine.slot for engine in prefillers if engine.numerics == decode.numerics]
        return Plan(same, decode) if same else Plan([decode.slot])

    def choose_decode(self, engines: Sequence[ReadyEngine], keys: Sequence[bytes], num_tokens: int) -> ReadyEngine:
        """Return which of these engines, at least one, is to continue a prompt."""
        loads = self.routing.loads
        cost = loads.blocks + RUNNING_BLOCKS * loads.running + loads.queued / self.routing.block_size
        cost = cost - self.routing.overlap(self._reusable(keys, num_tokens)).worth
        return min(engines, key=lambda engine: (cost[engine.slot], loads.running[engine.slot], engine.slot))

    def _is_local(self, decode: ReadyEngine, keys: Sequence[bytes], num_tokens: int, *, reads_cache: bool) -> bool:
        """Whether an engine of the decode side computes itself what it does not have of a prompt."""
        if not reads_cache:
            return num_tokens <= self.local_tokens
        reusable = self._reusable(keys, num_tokens)
        held = self.routing.overlap(reusable).held[decode.slot]
        # what fills no block cannot be fetched
        return bool(held >= len(reusable) or num_tokens - held * self.routing.block_size <= self.local_tokens)

    def _reusable(self, keys: Sequence[bytes], num_tokens: int) -> Sequence[bytes]:
        """Return the keys of the blocks that may be cached: the last token is always computed."""
        return keys[: (num_tokens - 1) // self.routing.block_size]


def stays(prefill: ReadyEngine, decode: ReadyEngine) -> bool:
    """Return whether a prompt continues where it is computed: handing it over would relieve no engine."""
    return prefill is decode or prefill.role is decode.role is EngineRole.MIXED


def continues(submit: Submit) -> bool:
    """Return whether a sequence has more to do than to compute its prompt and, maybe, to draw one token."""
    if submit.kind is not SequenceKind.GENERATE:
        return False
    return submit.sampling.max_tokens - len(submit.output_token_ids) > 1
