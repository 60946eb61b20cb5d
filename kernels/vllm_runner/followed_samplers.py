"""Samplers of the ranks that follow rank 0: they draw nothing, and yield what rank 0 has drawn.

`following_rank.py` puts one of them where the runner has its own. With runner V1 the tokens come from rank 0's host,
by message; with V2 from its device, in a collective, so that no host waits for them.

What must always hold: the runner's idea of its batch is compared with the step, as on rank 0. Both runners order their
rows by what they were told alone, so that the order is the same on all ranks; V1's is compared, too.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .rank_messages import RowsDrawn, RunPass
from .runner_checks import check_batch, check_known_to_host
from .runner_outputs import output_of_v1, output_of_v2, share_tokens
from .sampler_frame import InItsPlace


class Rank(Protocol):
    """What a sampler needs to know of its rank."""

    size: int

    @property
    def runner(self) -> Any: ...

    @property
    def told(self) -> RunPass:
        """The pass that is running."""
        ...

    def drawn(self, order: list[int]) -> RowsDrawn:
        """Wait for what rank 0 draws in this pass. `order`: this rank's order of rows."""
        ...


class _Followed(InItsPlace):
    """What both have in common."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank.runner)
        self._rank = rank


class FollowedSampler(_Followed):
    """For runner V1."""

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        runner = self._runner
        order = check_batch(runner.input_batch, runner.input_ids.cpu, self._rank.told.step)
        drawn = self._rank.drawn(order)
        return output_of_v1(order, drawn.rows, drawn.token_ids, logits.device)


class FollowedDeviceSampler(_Followed):
    """For runner V2."""

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        rank = self._rank
        order = check_known_to_host(input_batch, self._runner.block_tables.num_blocks.np[0], rank.told.step)
        ids_R = torch.zeros(len(order), dtype=torch.int64, device=self._runner.device)
        share_tokens(ids_R, rank.size)
        return output_of_v2(order, rank.told.samples, ids_R)
