"""An executor with a draft model, as it is loaded: what the draft model takes of the memory, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.executor.drafter import Drafter
from quipu.actors.engine.executor.loading import load_executor, numerics_of
from quipu.actors.engine.executor.step_runner import Executor
from tests.tiny import TINY

MIB = 1 << 20


def draft_folder(folder: Path, **entries: object) -> str:
    """Make a checkpoint like the tiny one without weights, with other entries of config.json."""
    folder.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    return str(folder)


@contextmanager
def loaded(**changes: Any) -> Iterator[Executor]:
    settings = {"executor": "reference", "speculative": "ngram", "speculative_costs": ((1, 1.0), (8, 1.5))}
    settings |= {"draft_model_costs": ((1, 0.1), (8, 0.2)), "max_num_seqs": 4, "max_num_batched_tokens": 64}
    config = EngineConfig(
        model_path=str(TINY),
        load_format="dummy",
        max_model_len=256,
        eos_token_ids=(),
        **{"kv_cache_bytes": MIB, **settings, **changes},
    )
    executor = load_executor(config)
    yield executor
    executor.close()


def test_memory_is_shared(tmp_path: Path) -> None:
    """A draft model of half the layers has as many blocks, in the same memory; numerics are the model's alone."""
    with loaded() as alone:
        plan, numerics = alone.backend.memory_plan, numerics_of(alone.backend.capabilities)
    with loaded(draft_model=draft_folder(tmp_path / "half", num_hidden_layers=2)) as both:
        assert isinstance(both.drafter, Drafter) and both.drafter.model is not None
        model = both.drafter.model.model
        ours, theirs = both.backend.memory_plan, model.backend.memory_plan
        assert ours.block_bytes == plan.block_bytes == 2 * theirs.block_bytes
        assert ours.num_blocks == theirs.num_blocks == MIB // (ours.block_bytes + theirs.block_bytes)
        assert ours.num_blocks < plan.num_blocks
        assert numerics_of(both.backend.capabilities) == numerics
        assert [model.costs.of_pass(num) for num in (1, 8)] == [0.1, 0.2]


def test_measured_costs(tmp_path: Path) -> None:
    """Without given costs, passes of both are timed."""
    folder = draft_folder(tmp_path / "draft", num_hidden_layers=1)
    with loaded(draft_model=folder, speculative_costs=None, draft_model_costs=None) as executor:
        assert isinstance(executor.drafter, Drafter) and executor.drafter.model is not None
        assert executor.drafter.model.model.costs.of_pass(1) > 0 < executor.drafter.costs.of_pass(1)


@pytest.mark.parametrize(
    ("entries", "changes", "reason"),
    [
        ({"vocab_size": 4224}, {}, "--draft-model .*: its vocabulary has 4224 tokens, and the model's 4096"),
        ({"max_position_embeddings": 128}, {}, "--draft-model .*: max_model_len 256 exceeds"),
        ({"model_type": "unknown", "architectures": ["Unknown"]}, {}, "--draft-model .*Unknown"),
        ({}, {"executor": "fake"}, "--draft-model: the fake executor runs none"),
        ({}, {"executor": "transformers"}, "--draft-model: the transformers executor runs none"),
        ({}, {"speculative": "off"}, "--draft-model: --speculative must not be off"),
        ({}, {"kv_cache_bytes": 4 * 2 * 16 * 1024}, r"one sequence of 256 tokens \(max_model_len\) needs"),
    ],
)
def test_refused(tmp_path: Path, entries: dict[str, object], changes: dict[str, Any], reason: str) -> None:
    """A draft model that cannot guess for the model is refused by name, before its weights are read."""
    folder = draft_folder(tmp_path / "draft", **entries)
    with pytest.raises(ValueError, match=reason), loaded(draft_model=folder, **changes):
        pass
