"""Our sampler in the place of vLLM's: draws from the logits that the model runner hands to its sampler.

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
from .runner_requests import RunnerStep

_NO_TOKEN = -1  # vLLM's PLACEHOLDER_TOKEN_ID
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


class LogitSampler:
    """Stands where the runner has its own sampler."""

    def __init__(self, runner: Any, num_threads: int, followers: Followers) -> None:
        """`followers` are told what was drawn, and take part in computing logits."""
        self._runner = runner
        self._followers = followers
        self._theirs = runner.sampler
        self._pass: _Pass | None = None
        self._draw: Callable[[StepBatch, Sequence[int], npt.NDArray[np.float32]], list[int | None]] = draw
        self._score: Callable[[torch.Tensor, Sequence[int], list[int], list[int]], Scores] = score_rows
        try:
            library = load_kernels().library
        except CannotBuild:
            return  # the oracle draws the same tokens, more slowly
        self._draw = partial(draw_natively, library, num_threads=num_threads)

        def score(logits_MV: torch.Tensor, rows: Sequence[int], target_ids: list[int], num_top: list[int]) -> Scores:
            return score_natively(library, logits_MV.numpy(), rows, target_ids, num_top, num_threads=num_threads)

        self._score = score

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
        return drawn_output(order, rows, drawn.token_ids, logits.device)

    def finish(self, hidden_states_ND: torch.Tensor) -> Drawn:
        """Return what was drawn, with scores if any are requested. `hidden_states_ND` are in the runner's order."""
        one_pass, self._pass = self._pass, None
        if one_pass is None or one_pass.drawn is None:
            raise RunnerDiverged("vLLM's runner has run a pass without sampling")
        batch, step = one_pass.batch, one_pass.step
        if batch.scoring is None:
            return one_pass.drawn
        flat = _flat_places(step, [step.request_ids.index(name) for name in self._runner.input_batch.req_ids])

        def head(tokens: list[int]) -> tuple[torch.Tensor, range]:
            places = [flat[token] for token in tokens]
            with self._followers.entering(ComputeHead(places)):
                logits_NV = self._runner.model.compute_logits(hidden_states_ND[places])
            return logits_NV.to("cpu", torch.float32).contiguous(), range(len(tokens))

        drawn_logits = (one_pass.logits_MV, range(len(one_pass.drawn.rows)))
        return add_scores(one_pass.drawn, batch.scoring, drawn_logits, head, self._score, at_once=_SCORED_AT_ONCE)


def drawn_output(order: list[int], rows: list[int], token_ids: list[int], device: torch.device) -> Any:
    """Return what the runner expects of a sampler: the tokens of these rows of the step, in the runner's order."""
    from vllm.v1.outputs import SamplerOutput

    # two columns, because a row of these may yield no token at all
    ids_M2 = torch.full((len(order), 2), _NO_TOKEN, dtype=torch.int32)
    if rows:
        place_of = {row: place for place, row in enumerate(order)}
        ids_M2[[place_of[row] for row in rows], 0] = torch.tensor(token_ids, dtype=torch.int32)
    return SamplerOutput(sampled_token_ids=ids_M2.to(device), logprobs_tensors=None)


def _flat_places(step: RunnerStep, order: list[int]) -> list[int]:
    """Return where in the runner's order each flat token of the batch is."""
    starts, place = {}, 0
    for row in order:
        starts[row] = place
        place += step.counts[row]
    return [starts[row] + at for row, count in enumerate(step.counts) for at in range(count)]


def check_batch(input_batch: Any, input_ids: torch.Tensor, step: RunnerStep) -> list[int]:
    """Return the rows of the step in the runner's order.

    Raises RunnerDiverged unless the runner has computed exactly these rows: at these positions, from these tokens,
    through tables of this length that end with this block, and the tables of new requests entry by entry.
    """
    names = list(input_batch.req_ids)
    row_of = {name: row for row, name in enumerate(step.request_ids)}
    if len(names) != len(row_of) or any(name not in row_of for name in names):
        raise RunnerDiverged(f"vLLM's runner has requests {names} in its batch instead of {step.request_ids}")
    order = [row_of[name] for name in names]
    count = len(order)
    table = input_batch.block_table[0]
    num_blocks = [step.num_blocks[row] for row in order]
    last_blocks = table.block_table.np[range(count), np.subtract(num_blocks, 1)]
    columns = {
        "positions": (input_batch.num_computed_tokens_cpu[:count], [step.positions[row] for row in order]),
        "lengths of block tables": (table.num_blocks_per_row[:count], num_blocks),
        "last blocks": (last_blocks, [step.last_blocks[row] for row in order]),
    }
    fed = [token_id for row in order for token_id in step.inputs[row]]
    columns["input tokens"] = (input_ids[: len(fed)].numpy(), fed)
    place_of = {name: place for place, name in enumerate(names)}
    for new in step.announced:
        place = place_of[new.request_id]
        columns[f"blocks of request {new.request_id}"] = (table.block_table.np[place, : len(new.table)], new.table)
    for what, (theirs, ours) in columns.items():
        if not np.array_equal(theirs, ours):
            raise RunnerDiverged(f"vLLM's runner has other {what} than the batch: {list(theirs)} instead of {ours}")
    return order
