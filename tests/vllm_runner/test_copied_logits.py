"""Copies of logits in memory that passes share."""

from __future__ import annotations

import pytest
import torch

from quipu.kernels.vllm_runner.copied_logits import KEPT_ROWS, CopiedLogits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies(dtype: torch.dtype) -> None:
    """A copy has the rows that are asked for, whatever the one before has left, and what is done to it stays there."""
    copies, memory = CopiedLogits(), []
    for places in ([0, 1, 2], [2, 0], [1], [2, 1, 0], [0, 1, 2]):
        logits_PV = torch.randn(3, 50).to(dtype)
        raw_PV = logits_PV.clone()
        copy_MV = copies.of(logits_PV, places)
        assert copy_MV.dtype == torch.float32 and copy_MV.is_contiguous()
        assert torch.equal(copy_MV, raw_PV[places].float())
        copy_MV.fill_(7)
        assert torch.equal(logits_PV, raw_PV)
        memory.append(copy_MV.data_ptr())
    assert len(set(memory)) == 1, "only a pass that is larger than all before needs memory"


def test_memory_of_many_rows_is_not_kept() -> None:
    """What the largest pass needs is not held for good."""
    copies = CopiedLogits()
    few = copies.of(torch.randn(2, 50), [0, 1]).data_ptr()
    many = torch.randn(KEPT_ROWS + 1, 50)
    assert torch.equal(copies.of(many, list(range(KEPT_ROWS + 1))), many)
    assert copies.of(torch.randn(2, 50), [0, 1]).data_ptr() == few
