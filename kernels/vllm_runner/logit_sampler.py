"""Our sampler in the place of that of vLLM's runner V1: draws on the host, from the logits that the runner computes.

`vllm_backend.py` installs one `LogitSampler` and gives it the batch of each pass. Rules, masks, seeds, scores and rows
with NaN are then those of every other backend: the C++ sampler of the CPU kernels where it runs, else the oracle.

What must always hold: rows are found by the runner's request ids, in whatever order it has them; a row that draws
nothing yields no token, so that the runner adds none to its request; the runner's idea of its batch is compared with
ours before anything is drawn, and a difference ends the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from ..batch import Drawn, StepBatch
from ..cpu.build import CannotBuild, load_kernels
from ..cpu.sampler import draw as draw_natively
from ..cpu.sampler import draw_bfloat16
from ..cpu.scores import score as score_natively
from ..sampling.logprobs import add_scores, score_rows
from ..sampling.oracle import draw
from ..step_types import Scores
from .followers import Followers
from .rank_messages import RowsDrawn
from .runner_checks import check_batch
from .runner_outputs import output_of_v1
from .runner_requests import RunnerStep
from .sampler_frame import PassSampler, not_sampled

Draw = Callable[[StepBatch, Sequence[int], npt.NDArray[np.float32]], list[int | None]]
DrawBfloat16 = Callable[[StepBatch, Sequence[int], npt.NDArray[np.uint16], Sequence[int]], list[int | None]]
Score = Callable[[torch.Tensor, Sequence[int], list[int], list[int]], Scores]
_SCORED_AT_ONCE = 64
"""Prompt tokens whose logits are held at a time."""


@attrs.define
class _Pass:
    """What is drawn in one pass."""

    batch: StepBatch
    step: RunnerStep
    drawn: Drawn | None = None
    logits_MV: torch.Tensor = attrs.field(factory=lambda: torch.empty(0, 0))
    """float32, of `drawn.rows`."""


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


class LogitSampler(PassSampler[_Pass]):
    """Draws for runner V1."""

    def __init__(self, runner: Any, num_threads: int, followers: Followers) -> None:
        super().__init__(runner, followers)
        self._sampling = host_sampling(num_threads)

    def begin(self, batch: StepBatch, step: RunnerStep) -> None:
        """Set what the next call draws for."""
        self._pass = _Pass(batch, step)

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Draw for the rows that do, from the logits of each row's last token, in the runner's order."""
        one = self._running()
        batch, step = one.batch, one.step
        order = check_batch(self._runner.input_batch, self._runner.input_ids.cpu, step)
        rows = [row for row, samples in enumerate(batch.samples) if samples]
        if rows:
            place_of = {row: place for place, row in enumerate(order)}
            drawn = Drawn.of(batch, rows, self._draw(one, rows, logits, [place_of[row] for row in rows]))
        else:
            drawn = Drawn([], [])
        self._followers.tell(RowsDrawn(order, rows, drawn.token_ids))
        one.drawn = drawn
        return output_of_v1(order, rows, drawn.token_ids, logits.device)

    def finish(self, hidden_states_ND: torch.Tensor) -> Drawn:
        """Return what was drawn, with scores if any are requested. `hidden_states_ND` are in the runner's order."""
        one = self._end()
        if one is None or one.drawn is None:
            raise not_sampled()
        if one.batch.scoring is None:
            return one.drawn
        head = self._head(one, one.step.rows_in_order(self._runner.input_batch.req_ids), hidden_states_ND, _on_host)
        drawn_logits = (one.logits_MV, range(len(one.drawn.rows)))
        return add_scores(
            one.drawn, one.batch.scoring, drawn_logits, head, self._sampling.score, at_once=_SCORED_AT_ONCE
        )

    def _draw(self, one: _Pass, rows: list[int], logits: torch.Tensor, places: list[int]) -> list[int | None]:
        """Draw a token for each of these rows, whose logits are at these places."""
        batch, draw_bfloat16 = one.batch, self._sampling.draw_bfloat16
        reads_only = batch.processing is None and batch.scoring is None
        if reads_only and draw_bfloat16 is not None and logits.dtype == torch.bfloat16 and logits.device.type == "cpu":
            return draw_bfloat16(batch, rows, logits.view(torch.uint16).numpy(), places)
        one.logits_MV = _on_host(logits[places])  # a copy in any case: rules change it
        return self._sampling.draw(batch, rows, one.logits_MV.numpy())


def _on_host(logits: torch.Tensor) -> torch.Tensor:
    return logits.to("cpu", torch.float32).contiguous()
