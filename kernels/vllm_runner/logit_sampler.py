"""Our sampler in the place of that of vLLM's runner V1: draws on the host, from the logits that the runner computes.

`vllm_backend.py` installs one `LogitSampler` and gives it the batch of each pass. Tokens are drawn as on other backends
(`host_sampling.py`).

What must always hold: rows are found by the runner's request ids, in whatever order it has them; a row that draws
nothing yields no token, so that the runner adds none to its request; the runner's idea of its batch is compared with
ours before anything is drawn, and a difference ends the engine.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ..batch import Drawn, StepBatch
from ..host_sampling import host_sampling
from ..sampling.logprobs import add_scores
from .banned_tokens import banned
from .copied_logits import CopiedLogits
from .followers import Followers
from .rank_messages import RowsDrawn
from .runner_checks import check_batch
from .runner_outputs import output_of_v1
from .runner_requests import RunnerStep
from .sampler_frame import PassSampler, not_sampled

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


class LogitSampler(PassSampler[_Pass]):
    """Draws for runner V1."""

    def __init__(self, runner: Any, num_threads: int, followers: Followers) -> None:
        super().__init__(runner, followers)
        self._sampling = host_sampling(num_threads)
        self._copies = CopiedLogits()

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
        is_readable = logits.dtype == torch.bfloat16 and logits.device.type == "cpu"
        if is_readable and draw_bfloat16 is not None and batch.scoring is None:
            bits_PV = logits.view(torch.uint16).numpy()
            if batch.processing is None:
                return draw_bfloat16(batch, rows, bits_PV, places)
            with banned(batch.processing, dict(zip(rows, places, strict=True)), bits_PV) as is_done:
                if is_done:
                    return draw_bfloat16(batch, rows, bits_PV, places)
        one.logits_MV = self._copies.of(logits, places)
        return self._sampling.draw(batch, rows, one.logits_MV.numpy())


def _on_host(logits: torch.Tensor) -> torch.Tensor:
    return logits.to("cpu", torch.float32).contiguous()
