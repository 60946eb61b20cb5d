"""An executor with a draft model, as it is loaded: what the draft model takes of the memory, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.engine import Engine
from quipu.actors.engine.executor.draft_depth import FREE
from quipu.actors.engine.executor.draft_model import DraftModel, Wanted
from quipu.actors.engine.executor.drafter import Drafter
from quipu.actors.engine.executor.loading import load_executor, numerics_of
from quipu.actors.engine.executor.sequence_state import SequenceState
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.supervisor import DraftModelMemory
from quipu.actors.shared.block_keys import chain_keys
from quipu.kernels.batch import Drawn, StepBatch
from tests.kernels.cpu.cpu_backends import needs_kernels
from tests.prompts import prompt_of
from tests.tiny import TINY

MIB = 1 << 20
ROOT = bytes(32)


def draft_folder(folder: Path, **entries: object) -> str:
    """Make a checkpoint like the tiny one without weights, with other entries of config.json."""
    folder.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    return str(folder)


def config_of(**changes: Any) -> EngineConfig:
    settings = {"executor": "reference", "speculative": "ngram", "speculative_costs": ((1, 1.0), (8, 1.5))}
    settings |= {"draft_model_costs": ((1, 0.1), (8, 0.2)), "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return EngineConfig(
        model_path=str(TINY),
        load_format="dummy",
        max_model_len=256,
        eos_token_ids=(),
        **{"kv_cache_bytes": MIB, **settings, **changes},
    )


@contextmanager
def loaded(**changes: Any) -> Iterator[Executor]:
    executor = load_executor(config_of(**changes))
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


def test_reported_memory(tmp_path: Path) -> None:
    """A ready engine says what its draft model takes of the memory, apart from what the model takes."""
    with loaded() as alone:
        ready = Engine(config_of(), alone).ready(1)
        assert ready.draft_model is None
    fields = {"draft_model": draft_folder(tmp_path / "half", num_hidden_layers=2)}
    with loaded(**fields) as both:
        model, draft = (backend.memory_plan for backend in (both.backend, *both.others))
        beside = Engine(config_of(**fields), both).ready(1)
    assert beside.draft_model == DraftModelMemory(draft.weights_bytes, draft.num_blocks * draft.block_bytes)
    assert (beside.weights_bytes, beside.kv_cache_bytes) == (ready.weights_bytes, model.num_blocks * model.block_bytes)
    assert 0 < beside.draft_model.weights_bytes < beside.weights_bytes
    assert beside.draft_model.kv_cache_bytes + beside.kv_cache_bytes <= MIB


def test_measured_costs(tmp_path: Path) -> None:
    """Without given costs, passes of both are timed."""
    folder = draft_folder(tmp_path / "draft", num_hidden_layers=1)
    with loaded(draft_model=folder, speculative_costs=None, draft_model_costs=None) as executor:
        assert isinstance(executor.drafter, Drafter) and executor.drafter.model is not None
        assert executor.drafter.model.model.costs.of_pass(1) > 0 < executor.drafter.costs.of_pass(1)


@pytest.mark.parametrize("executor", [pytest.param("cpu", marks=needs_kernels), "reference"])
def test_rows_read_what_others_compute(tmp_path: Path, executor: str) -> None:
    """Of a prefix that sequences share, the first computes all, and the next reads it in the same pass: it is guessed
    as if it had computed it."""
    tokens = prompt_of(48, seed=1)
    first, second = tokens + prompt_of(9, seed=2), tokens + prompt_of(7, seed=3)

    def state(slot: int, token_ids: list[int], table: list[int]) -> SequenceState:
        keys = [ROOT, *chain_keys(ROOT, token_ids, 16)]
        return SequenceState(slot, SamplingParams(max_tokens=9, temperature=0.0), 1, keys, token_ids, table=table)

    with loaded(
        draft_model=draft_folder(tmp_path / "draft", num_hidden_layers=2), executor=executor, num_blocks=32
    ) as both:
        assert isinstance(both.drafter, Drafter) and both.drafter.model is not None
        backend, lengths = both.drafter.model.model.backend, []
        step = backend.step

        def watched(batch: StepBatch) -> Drawn:
            lengths.append(len(batch.token_ids))
            return step(batch)

        with mock.patch.object(backend, "step", watched):

            def guess(*wanted: Wanted) -> list[list[int]]:
                return DraftModel(backend, FREE, max_num_tokens=64).guess(wanted)

            alone = guess(Wanted(2, state(0, second, [9, 10, 11, 12]), 4))
            together = guess(Wanted(1, state(1, first, [1, 2, 3, 4]), 4), Wanted(2, state(2, second, [1, 2, 3, 5]), 4))
    assert lengths == [48 + 7, 1, 1, 1, 48 + 9 + 7, 2, 2, 2]
    assert together[1] == alone[0]


@pytest.mark.parametrize(
    ("entries", "changes", "reason"),
    [
        ({"vocab_size": 4224}, {}, "--draft-model .*: its vocabulary has 4224 tokens, and the model's 4096"),
        ({"max_position_embeddings": 128}, {}, "--draft-model .*: max_model_len 256 exceeds"),
        ({"odd": 1}, {}, "--draft-model .*: config.json has entries that are not understood: odd"),
        ({"odd": 1}, {"ignored_config_entries": ("odd",)}, "^--ignore-config-entries: odd is no entry"),
        ({}, {"ignored_config_entries": ("draft_model.odd",)}, "--draft-model .*: --ignore-config-entries: odd is no"),
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


def test_ignored_entries(tmp_path: Path) -> None:
    """Entries of a draft model that are not understood are ignored if they are named with `draft_model.`."""
    folder = draft_folder(tmp_path / "draft", num_hidden_layers=1, odd=1)
    with loaded(draft_model=folder, ignored_config_entries=("draft_model.odd",)) as both:
        assert isinstance(both.drafter, Drafter) and both.drafter.model is not None
    with (
        pytest.raises(ValueError, match=r"--ignore-config-entries: draft_model\.odd is no"),
        loaded(ignored_config_entries=("draft_model.odd",)),
    ):
        pass
