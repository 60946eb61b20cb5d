"""Whether engines would compute the same bits, so that one may continue what another has begun."""

from __future__ import annotations

from ..messages.supervisor import EngineReady
from ..request_desk.engine_pool import EnginePool, PooledEngine


class Mismatch(Exception):
    """An engine that is ready cannot serve beside the others."""


def check_numerics(pool: EnginePool, engine: PooledEngine, ready: EngineReady) -> None:
    """Raises Mismatch if an engine that has become ready differs from one that may serve."""
    for other in pool:
        if (its := other.ready) is None or other is engine or other.is_given_up:
            continue
        if its.numerics != ready.numerics:
            ours, theirs = _arithmetic(engine, ready), _arithmetic(other, its)
            raise Mismatch(f"engines would compute different bits: {ours}, and {theirs}")


def _arithmetic(engine: PooledEngine, ready: EngineReady) -> str:
    weights = ready.weights and f"weights {ready.weights}"
    kv = None if ready.kv_cache_dtype in (None, ready.dtype) else f"{ready.kv_cache_dtype} KV"
    parts = (ready.backend, ready.library, ready.dtype, weights, kv, ready.instruction_set, ready.determinism)
    return f"engine {engine.engine_id} has numerics {ready.numerics} ({', '.join(part for part in parts if part)})"
