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
from ..cpu.scores import score as score_natively
from ..sampling.logprobs import add_scores, score_rows
from ..sampling.oracle import draw
from ..step_errors import RunnerDiverged
from ..step_types import Scores
from .followers import Followers
from .rank_messages import ComputeHead, RowsDrawn
from .runner_checks import check_batch
from .runner_outputs import output_of_v1
from .runner_requests import RunnerStep

Draw = Callable[[StepBatch, Sequence[int], npt.NDArray[np.float32]], list[int | None]]
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


def host_sampling(num_threads: int) -> tuple[Draw, Score]:
    """Return what draws from logits on the host, and what scores them: C++ where it runs, else the oracles."""
    try:
        library = load_kernels().library
    except CannotBuild:
        return draw, score_rows  # the same tokens, more slowly

    def score(logits_MV: torch.Tensor, rows: Sequence[int], target_ids: list[int], num_top: list[int]) -> Scores:
        return score_natively(library, logits_MV.numpy(), rows, target_ids, num_top, num_threads=num_threads)

    return partial(draw_natively, library, num_threads=num_threads), score


class LogitSampler:
    """Stands where the runner has its own sampler."""

    def __init__(self, runner: Any, num_threads: int, followers: Followers) -> None:
        """`followers` are told what was drawn, and take part in computing logits."""
        self._runner = runner
        self._followers = followers
        self._theirs = runner.sampler
        self._pass: _Pass | None = None
        self._draw, self._score = host_sampling(num_threads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)  # what the runner reads of a sampler besides calling it

    def begin(self, batch: StepBatch, step: RunnerStep) -> None:
        """Set what the next call draws for."""
        self._pass = _Pass(batch, step)

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Draw for the rows that do, from the logits of each row's last token, in the runner's order."""
        one_pass = self._pass
        if one_pass is None:
            raise RunnerDiverged("vLLM's runner samples outside of a pass")
        batch, step = one_pass.batch, one_pass.step
        order = check_batch(self._runner.input_batch, self._runner.input_ids.cpu, step)
        rows = [row for row, samples in enumerate(batch.samples) if samples]
        if rows:
            place_of = {row: place for place, row in enumerate(order)}
            places = [place_of[row] for row in rows]
            # a copy in any case: rules change it
            one_pass.logits_MV = logits[places].to("cpu", torch.float32).contiguous()
            drawn = Drawn.of(batch, rows, self._draw(batch, rows, one_pass.logits_MV.numpy()))
        else:
            drawn = Drawn([], [])
        self._followers.tell(RowsDrawn(order, rows, drawn.token_ids))
        one_pass.drawn = drawn
        return output_of_v1(order, rows, drawn.token_ids, logits.device)

    def finish(self, hidden_states_ND: torch.Tensor) -> Drawn:
        """Return what was drawn, with scores if any are requested. `hidden_states_ND` are in the runner's order."""
        one_pass, self._pass = self._pass, None
        if one_pass is None or one_pass.drawn is None:
            raise RunnerDiverged("vLLM's runner has run a pass without sampling")
        batch, step = one_pass.batch, one_pass.step
        if batch.scoring is None:
            return one_pass.drawn
        flat = step.flat_places(step.rows_in_order(self._runner.input_batch.req_ids))

        def head(tokens: list[int]) -> tuple[torch.Tensor, range]:
            places = [flat[token] for token in tokens]
            with self._followers.entering(ComputeHead(places)):
                logits_NV = self._runner.model.compute_logits(hidden_states_ND[places])
            return logits_NV.to("cpu", torch.float32).contiguous(), range(len(tokens))

        drawn_logits = (one_pass.logits_MV, range(len(one_pass.drawn.rows)))
        return add_scores(one_pass.drawn, batch.scoring, drawn_logits, head, self._score, at_once=_SCORED_AT_ONCE)
