"""How the host draws and scores from logits that a library has computed, for backends without a sampler of their own.

`vllm_runner/` and `transformers_runner/` ask once. Rules, masks, seeds, scores and rows with NaN are then those of
every other backend: the C++ sampler of the CPU kernels where it runs, else the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import numpy as np
import numpy.typing as npt
import torch

from .batch import StepBatch
from .cpu.build import CannotBuild, load_kernels
from .cpu.sampler import draw as draw_natively
from .cpu.sampler import draw_bfloat16
from .cpu.scores import score as score_natively
from .sampling.logprobs import score_rows
from .sampling.oracle import draw
from .step_types import Scores

Draw = Callable[[StepBatch, Sequence[int], npt.NDArray[np.float32]], list[int | None]]
DrawBfloat16 = Callable[[StepBatch, Sequence[int], npt.NDArray[np.uint16], Sequence[int]], list[int | None]]
Score = Callable[[torch.Tensor, Sequence[int], list[int], list[int]], Scores]


@attrs.frozen
class HostSampling:
    """How the host draws and scores: in C++ where it runs, else by the oracles, more slowly."""

    draw: Draw
    score: Score
    draw_bfloat16: DrawBfloat16 | None
    """Draws where nothing changes logits, without a copy of them in float32."""


def host_sampling(num_threads: int) -> HostSampling:
    try:
        library = load_kernels().library
    except CannotBuild:
        return HostSampling(draw, score_rows, None)

    def score(logits_MV: torch.Tensor, rows: Sequence[int], target_ids: list[int], num_top: list[int]) -> Scores:
        return score_natively(library, logits_MV.numpy(), rows, target_ids, num_top, num_threads=num_threads)

    return HostSampling(
        partial(draw_natively, library, num_threads=num_threads),
        score,
        partial(draw_bfloat16, library, num_threads=num_threads),
    )
