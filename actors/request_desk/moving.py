"""Which sequences leave an engine that an operator relieves, and where they may go. Used by `fleet/engine_manager.py`.

What must always hold: a sequence leaves only for an engine that computes the same bits; one that has drawn no token
stays, so that where its prompt was found in a cache is decided once.
"""

from __future__ import annotations

from .engine_pool import EnginePool, PooledEngine
from .health import CannotMove
from .live_sequences import LiveSequences


def targets_of(pool: EnginePool, source: PooledEngine, target_id: int | None) -> frozenset[int]:
    """Return the engines that may continue what leaves `source`: those that are for that, or `target_id`.

    Raises CannotMove.
    """
    if source.ready is None:
        raise CannotMove(f"Engine {source.engine_id} is not ready.")
    numerics = source.ready.numerics
    able = {
        engine.engine_id
        for engine in pool
        if engine is not source and engine.is_open and engine.ready is not None and engine.ready.numerics == numerics
    }
    wanted = {i for i in able if pool[i].role.may_decode} if target_id is None else able & {target_id}
    if not wanted:
        which = "No other engine" if target_id is None else f"Engine {target_id} is not another one that"
        raise CannotMove(f"{which} is ready and computes the same bits as engine {source.engine_id}.")
    return frozenset(wanted)


def move_some(sequences: LiveSequences, source: PooledEngine, count: int, targets: frozenset[int]) -> int:
    """Have the latest of an engine's running sequences continue on other engines, with their blocks; return how many.

    At most `count`; those that are about to leave it anyway are not counted.
    """
    chosen: list[int] = []
    for sequence_id in sorted(sequences.held_by(source.health.incarnation), reverse=True):
        live = sequences.find(sequence_id)
        if len(chosen) == count:
            break
        if live is None or not live.output_token_ids or live.ends_after_prefill:
            continue
        if not (live.aborted or live.has_ended or live.is_handed_over):
            live.goes_to = targets
            chosen.append(sequence_id)
    return sequences.hand_over(source, chosen, with_blocks=True)
