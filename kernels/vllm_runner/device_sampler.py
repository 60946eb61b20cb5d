"""Our sampler in the place of that of vLLM's runner V2: draws on the device, from the logits that the runner computes.

`vllm_backend.py` installs one `DeviceSampler` and gives it the batch of each pass. The tokens stay on the device, where
the runner feeds them to the next pass: that one may be launched before the host has read them. The draws are those of
the triton executor (`kernels/triton/sampler.py`): Philox by seed and output position, and masks. Rows with other rules
are drawn by the host, for which the launch waits; so it does where scores are requested.

What must always hold: rows are found by the runner's request ids, in whatever order it has them; a row that draws
nothing yields no token. The runner's idea of its batch is compared with ours: what the host knows of it before anything
is drawn, what only the device knows (positions, the last input and block of each row, tables of new requests) on the
device, and a difference ends the engine when the pass is collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from ..batch import Drawn, StepBatch
from ..sampling.logprobs import add_scores, score_rows
from ..step_errors import RunnerDiverged
from ..triton.device import send
from ..triton.sampler import Draw, Pending, Sampler
from .followers import Followers
from .runner_checks import check_known_to_host
from .runner_outputs import output_of_v2, share_tokens
from .runner_requests import RunnerStep
from .sampler_frame import PassSampler, not_sampled

_SCORED_AT_ONCE = 64
"""Prompt tokens whose logits are held at a time."""
_COMPARED = ("positions", "input tokens", "last blocks", "blocks of new requests")
"""What is compared on the device."""


@attrs.frozen
class TorchPlace:
    """Memory of a device of torch's."""

    torch_device: torch.device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.torch_device)


@attrs.define
class _Pass:
    """What is drawn in one pass."""

    batch: StepBatch
    step: RunnerStep
    order: list[int] = attrs.field(factory=list)
    """Rows of the step in the runner's order."""
    draws: DeviceDraws | None = None
    logits: tuple[torch.Tensor, list[int]] = attrs.field(factory=lambda: (torch.empty(0, 0), []))
    """Float32, and where among them those of the drawing rows are."""


@attrs.frozen
class DeviceDraws:
    """Tokens on their way to the host."""

    batch: StepBatch
    rows: list[int]
    """Those that draw, ascending."""
    host: torch.Tensor
    """Their ids, then why each has failed, then one number for each comparison, which is 0 if nothing differs."""
    event: Any
    """Passed once `host` is filled. None: it is."""

    def is_over(self) -> bool:
        return self.event is None or bool(self.event.query())

    def read(self) -> Drawn:
        """Wait for the tokens. Raises RunnerDiverged if the runner has computed something else than the batch."""
        if self.event is not None:
            self.event.synchronize()
        count = len(self.rows)
        differing: list[int] = self.host[2 * count :].tolist()
        if any(differing):
            named = [what for what, differs in zip(_COMPARED, differing, strict=True) if differs]
            raise RunnerDiverged(f"vLLM's runner has other {' and '.join(named)} than the batch")
        if not count:
            return Drawn([], [])
        pending = Pending(self.host[:count], self.host[count : 2 * count])
        return Drawn.of(self.batch, self.rows, pending.read(self.batch, self.rows))


class DeviceSampler(PassSampler[_Pass]):
    """Draws for runner V2."""

    def __init__(self, runner: Any, max_num_seqs: int, draw_on_host: Draw | None, followers: Followers) -> None:
        super().__init__(runner, followers)
        self._device: torch.device = runner.device
        self._sampler = Sampler(max_num_seqs, TorchPlace(self._device), draw_on_host)

    def warm_up(self) -> None:
        """Compile the kernels, so that no request waits for it."""
        logits_1V = torch.zeros((1, self._runner.vocab_size), device=self._device)
        row = StepBatch([0], [0, 1], [0], [0], [[0]], [True])
        self._sampler.begin(row, [0], logits_1V, [0])

    def begin(self, batch: StepBatch, step: RunnerStep) -> None:
        """Set what the next call draws for."""
        self._pass = _Pass(batch, step)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        """Draw for the rows that do, from the logits of each row's last token, in the runner's order."""
        one = self._running()
        batch, step = one.batch, one.step
        order = one.order = check_known_to_host(input_batch, self._runner.block_tables.num_blocks.np[0], step)
        differing = self._compare(batch, step, order, input_batch)  # before the last drawn tokens are replaced
        place_of = {row: place for place, row in enumerate(order)}
        rows = [row for row, samples in enumerate(batch.samples) if samples]
        places = [place_of[row] for row in rows]
        ids_R = torch.zeros(len(order), dtype=torch.int64, device=self._device)
        results = differing
        if rows:
            one.logits = logits.to(torch.float32), places
            pending = self._sampler.begin(batch, rows, *one.logits)
            ids_R.index_copy_(0, send(torch.tensor(places), self._device), pending.ids.to(torch.int64))
            results = torch.cat([pending.ids, pending.failed, differing])
        share_tokens(ids_R, 1 + len(self._followers))
        host = results.to("cpu", non_blocking=True)
        one.draws = DeviceDraws(batch, rows, host, self._event())
        return output_of_v2(order, batch.samples, ids_R)

    def finish(self, hidden_states_ND: torch.Tensor) -> DeviceDraws | Drawn:
        """Return what is being drawn, or, if scores are requested, what was. The tokens of `hidden_states_ND` are in
        the runner's order."""
        one = self._end()
        if one is None or one.draws is None:
            raise not_sampled()
        if one.batch.scoring is None:
            return one.draws
        head = self._head(one, one.order, hidden_states_ND, _as_floats)
        drawn = one.draws.read()
        return add_scores(drawn, one.batch.scoring, one.logits, head, score_rows, at_once=_SCORED_AT_ONCE)

    @property
    def _tables(self) -> torch.Tensor:
        """Every request's blocks, by the runner's index of it."""
        tables: torch.Tensor = self._runner.block_tables.block_tables[0].gpu
        return tables

    def _event(self) -> Any:
        if self._device.type != "cuda":
            return None
        cuda: Any = torch.cuda  # torch does not type all of it
        event = cuda.Event()
        event.record()
        return event

    def _compare(self, batch: StepBatch, step: RunnerStep, order: Sequence[int], input_batch: Any) -> torch.Tensor:
        """Return, for each of `_COMPARED`, whether the device has something else than the batch."""
        count = len(order)
        columns = np.empty((5, count), dtype=np.int64)
        for place, row in enumerate(order):
            inputs = step.inputs[row]
            columns[:, place] = (
                step.positions[row] + step.counts[row],
                -1 if inputs is None else inputs[-1],
                batch.slots[row],
                step.num_blocks[row] - 1,
                step.last_blocks[row],
            )
        ends_R, inputs_R, slots_R, last_R, blocks_R = send(torch.from_numpy(columns), self._device)
        # a token that the host does not know is the one that the slot drew last
        inputs_R = torch.where(inputs_R < 0, self._sampler.last_drawn[slots_R], inputs_R)
        compared = [
            (input_batch.seq_lens[:count] != ends_R).any(),
            (input_batch.input_ids[input_batch.logits_indices] != inputs_R).any(),
            (self._tables[input_batch.idx_mapping, last_R] != blocks_R).any(),
            self._other_tables(step, order, input_batch),
        ]
        return torch.stack(compared).to(torch.int32)

    def _other_tables(self, step: RunnerStep, order: Sequence[int], input_batch: Any) -> torch.Tensor:
        """Return whether the device has another table than that of a new request."""
        if not step.announced:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        place_of = {step.request_ids[row]: place for place, row in enumerate(order)}
        width = max(len(new.table) for new in step.announced)
        tables = np.full((len(step.announced), 1 + width), -1, dtype=np.int64)
        for at, new in enumerate(step.announced):
            tables[at, 0] = input_batch.idx_mapping_np[place_of[new.request_id]]
            tables[at, 1 : 1 + len(new.table)] = new.table
        sent = send(torch.from_numpy(tables), self._device)
        ours_AW = sent[:, 1:]
        theirs_AW = self._tables[sent[:, 0], :width]
        return ((theirs_AW != ours_AW) & (ours_AW >= 0)).any()


def _as_floats(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.float32)
