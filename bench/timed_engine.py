"""The engine process of a timed server (`timed_server.py`): the real engine with its steps and plans timed."""

from __future__ import annotations

import sys

from bench.spans import watch
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine import engine_server
from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.engine.executor.loading import load_executor
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.engine.scheduler.planning import Batcher


def load(config: EngineConfig) -> Executor:
    executor = load_executor(config)
    watch(executor.backend, "step", "step", lambda batch: len(batch.slots))
    return executor


def main() -> int:
    setattr(engine_server, "load_executor", load)  # noqa: B010 - an imported name, which mypy does not let others assign
    watch(BlockManager, "grant", "match")
    watch(Batcher, "submit", "schedule")
    watch(Batcher, "next_action", "schedule")
    watch(Batcher, "accept", "schedule")
    watch(Batcher, "on_done", "schedule")
    watch(Executor, "run", "books")
    return engine_server.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
