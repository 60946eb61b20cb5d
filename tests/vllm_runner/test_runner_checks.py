"""The comparison of the runner's batch with ours: a difference of any kind ends the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quipu.kernels.step_errors import RunnerDiverged, is_context_lost
from quipu.kernels.vllm_runner.runner_checks import check_batch, check_known_to_host
from quipu.kernels.vllm_runner.runner_requests import RunnerRequests, RunnerStep
from tests.kernels.step_batches import make_batch


def step() -> RunnerStep:
    """Return a pass over two new rows, of three tokens and of one."""
    return RunnerRequests(4, 4).begin(
        make_batch(
            {"slot": 0, "position": 0, "token_ids": [5, 6, 7], "blocks": [9]},
            {"slot": 1, "position": 4, "token_ids": [8], "blocks": [3, 2]},
        )
    )


def as_the_runner_has_it(**changes: Any) -> tuple[Any, torch.Tensor]:
    """Return its batch and its input tokens, with the second row first."""
    table = SimpleNamespace(
        num_blocks_per_row=np.array(changes.get("num_blocks", [2, 1, 0])),
        block_table=SimpleNamespace(np=np.array(changes.get("tables", [[3, 2], [9, 0], [0, 0]]))),
    )
    batch = SimpleNamespace(
        req_ids=changes.get("req_ids", ["2", "1"]),
        num_computed_tokens_cpu=np.array(changes.get("positions", [4, 0, 0])),
        block_table=[table],
    )
    return batch, torch.tensor(changes.get("inputs", [8, 5, 6, 7, 99]), dtype=torch.int32)


def test_order_is_the_runners() -> None:
    """Rows are found by their ids; what lies behind them in the runner's buffers does not matter."""
    assert check_batch(*as_the_runner_has_it(), step()) == [1, 0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"req_ids": ["2", "7"]}, "requests"),
        ({"req_ids": ["2"]}, "requests"),
        ({"req_ids": ["2", "1", "3"]}, "requests"),
        ({"positions": [5, 0, 0]}, "positions"),
        ({"num_blocks": [2, 2, 0]}, "lengths of block tables"),
        ({"tables": [[3, 1], [9, 0], [0, 0]]}, "last blocks"),
        ({"tables": [[1, 2], [9, 0], [0, 0]]}, "blocks of request 2"),
        ({"inputs": [8, 5, 6, 9, 99]}, "input tokens"),
    ],
)
def test_differences_are_fatal(changes: dict[str, Any], what: str) -> None:
    """Each of them is named, and no later pass is tried."""
    with pytest.raises(RunnerDiverged, match=what) as raised:
        check_batch(*as_the_runner_has_it(**changes), step())
    assert is_context_lost(raised.value)


def as_v2_has_it(**changes: Any) -> tuple[Any, Any]:
    """Return the batch of runner V2, with the second row first, and the lengths of its tables, by its own index."""
    batch = SimpleNamespace(
        req_ids=changes.get("req_ids", ["2", "1"]),
        num_scheduled_tokens=np.array(changes.get("counts", [1, 3])),
        num_computed_tokens_np=np.array(changes.get("positions", [4, 0])),
        idx_mapping_np=np.array([5, 0]),
    )
    return batch, np.array(changes.get("num_blocks", [1, 9, 9, 9, 9, 2]))


def test_order_is_that_of_v2() -> None:
    """It sorts rows by their number of tokens, and finds its tables by an index of its own."""
    assert check_known_to_host(*as_v2_has_it(), step()) == [1, 0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"req_ids": ["2", "7"]}, "requests"),
        ({"counts": [1, 2]}, "numbers of tokens"),
        ({"positions": [4, 1]}, "positions"),
        ({"num_blocks": [1, 9, 9, 9, 9, 3]}, "lengths of block tables"),
    ],
)
def test_differences_of_v2_are_fatal(changes: dict[str, Any], what: str) -> None:
    """What the host sees of them is named, too."""
    with pytest.raises(RunnerDiverged, match=what):
        check_known_to_host(*as_v2_has_it(**changes), step())
