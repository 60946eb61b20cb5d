"""Draw a step's tokens on the device, except for rows that the device cannot draw, which the host draws by the oracle.

The last token of a slot stays on the device, from where the next pass feeds it.

What must always hold: a row whose logits hold NaN or have no finite maximum affects no other row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch

import triton

from ..batch import StepBatch
from ..logit_processors import NONE_LEFT
from ..sampling.oracle import draw, fields_besides, sets_any
from .device import send
from .sample import draw_kernel, keep_drawn_kernel

APPLIED = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Fields of `RowSampling` that `draw_kernel` applies."""
LEFT_TO_ORACLE = fields_besides(APPLIED)
"""The others: a row that sets one is drawn by the host."""

_BLOCK = 4096
_BROKEN, _MASKED_OUT = 1, 2
_INT64_AT = 1 << 63
_LEAST_TEMPERATURE = 1e-30
"""Lower ones draw as this one does, among the likeliest: the kernel would find an infinite inverse in float32."""
Draw = Callable[[StepBatch, Sequence[int], npt.NDArray[np.float32]], list[int | None]]


@attrs.frozen
class Pending:
    """Draws that may still be in progress on the device."""

    ids: torch.Tensor
    failed: torch.Tensor
    """Per row: 0, `_BROKEN` if its own logits hold NaN or have no finite maximum, or `_MASKED_OUT`."""

    def read(self, batch: StepBatch, rows: Sequence[int]) -> list[int | None]:
        """Wait for the drawn ids; None for rows from which nothing can be drawn. Notes those that a mask has failed."""
        failed: list[int] = self.failed.tolist()
        ids: list[int] = self.ids.tolist()
        if not any(failed):
            return list(ids)
        if batch.processing is not None:
            for row, why in zip(rows, failed, strict=True):
                if why == _MASKED_OUT:
                    batch.processing.failures.setdefault(row, NONE_LEFT)
        return [None if why else token_id for token_id, why in zip(ids, failed, strict=True)]


def _masks_alone(batch: StepBatch, vocab_size: int) -> dict[int, npt.NDArray[np.int32]]:
    """Wait for the masks. Return those of rows that the device can draw with them; note which allow nothing."""
    processing = batch.processing
    if processing is None or not processing.masked_rows:
        return {}
    on_host = {*processing.rows}
    found = {}
    for row, mask in zip(processing.masked_rows, processing.masks(), strict=True):
        if row in on_host or (LEFT_TO_ORACLE and sets_any(batch.sampling[row], LEFT_TO_ORACLE)):
            continue
        if isinstance(mask, str):
            processing.failures[row] = mask
            continue
        words = np.zeros(-(-vocab_size // 32), np.uint32)
        given = np.frombuffer(mask, np.uint32)[: len(words)]
        words[: len(given)] = given
        if vocab_size % 32:
            words[-1] &= (1 << vocab_size % 32) - 1
        if words.any():
            found[row] = words.view(np.int32)
        else:
            processing.failures[row] = NONE_LEFT
    return found


class Place(Protocol):
    """What the sampler needs of a device."""

    @property
    def torch_device(self) -> torch.device: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


class Sampler:
    """Draws tokens for one backend."""

    def __init__(self, max_num_seqs: int, device: Place, draw_on_host: Draw | None = None) -> None:
        """`draw_on_host` draws as the oracle does, which it replaces."""
        self._device = device
        self._draw = draw_on_host
        self._most = triton.next_power_of_2(max_num_seqs)
        self.last_drawn = torch.zeros(max_num_seqs, dtype=torch.int32, device=device.torch_device)

    def begin(self, batch: StepBatch, rows: list[int], logits_MV: torch.Tensor, places: list[int]) -> Pending:
        """Draw for these rows; `places` are the rows of their logits (float32). Waits for rows drawn on the host."""
        num_rows, vocab_size = len(rows), logits_MV.shape[1]
        numbers = np.empty((num_rows, 3), dtype=np.float64)
        counts = np.empty((num_rows, 3), dtype=np.int64)
        for index, row in enumerate(rows):
            sampling = batch.sampling[row]
            least = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
            signed = sampling.seed - 2 * _INT64_AT if sampling.seed >= _INT64_AT else sampling.seed
            # 0 is greedy
            temperature = sampling.temperature and max(sampling.temperature, _LEAST_TEMPERATURE)
            numbers[index] = temperature, least, sampling.top_p
            counts[index] = sampling.top_k, signed, batch.output_position[row]
        slots = np.array([batch.slots[row] for row in rows], dtype=np.int64)
        sent = np.concatenate([numbers.view(np.int64).ravel(), counts.ravel(), slots, np.array(places)])
        on_device = send(torch.from_numpy(sent), self._device.torch_device)
        sent_numbers, sent_counts, sent_slots, sent_places = torch.split(
            on_device, [3 * num_rows, 3 * num_rows, num_rows, num_rows]
        )
        ids = self._device.empty((num_rows,), torch.int32)
        failed = self._device.empty((num_rows,), torch.int32)
        block = min(_BLOCK, triton.next_power_of_2(vocab_size))
        draw_kernel[(num_rows,)](
            logits_MV, logits_MV.stride(0), sent_places, sent_numbers.view(torch.float64), sent_counts, ids, failed,
            vocab_size, block, num_warps=max(1, block // 256),
        )  # fmt: skip
        numbers_M3, counts_M3 = sent_numbers.view(num_rows, 3), sent_counts.view(num_rows, 3)
        self._draw_masked(batch, rows, logits_MV, sent_places, numbers_M3, counts_M3, ids, failed)
        self._draw_on_host(batch, rows, logits_MV, places, ids)
        keep_drawn_kernel[(1,)](ids, sent_slots, self.last_drawn, num_rows, self._most)
        return Pending(ids, failed)

    def _draw_masked(
        self,
        batch: StepBatch,
        rows: list[int],
        logits_MV: torch.Tensor,
        places: torch.Tensor,
        numbers_M3: torch.Tensor,
        counts_M3: torch.Tensor,
        ids: torch.Tensor,
        failed: torch.Tensor,
    ) -> None:
        """Draw again for rows that have a mask and no other rules, once the masks are there: from a copy of theirs."""
        vocab_size = logits_MV.shape[1]
        masks = _masks_alone(batch, vocab_size)
        if not masks:
            return
        to_device = partial(send, device=self._device.torch_device)
        chosen_C = to_device(torch.tensor([index for index, row in enumerate(rows) if row in masks]))
        words_CW = to_device(torch.from_numpy(np.stack([masks[row] for row in rows if row in masks])))
        bits_CWb = words_CW[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words_CW.device) & 1
        banned_CV = bits_CWb.view(len(chosen_C), -1)[:, :vocab_size] == 0
        masked_CV = logits_MV[places[chosen_C]].masked_fill_(banned_CV, -math.inf)
        ids_C = self._device.empty((len(chosen_C),), torch.int32)
        failed_C = self._device.empty((len(chosen_C),), torch.int32)
        block = min(_BLOCK, triton.next_power_of_2(vocab_size))
        draw_kernel[(len(chosen_C),)](
            masked_CV, masked_CV.stride(0), torch.arange(len(chosen_C), device=words_CW.device),
            numbers_M3[chosen_C].view(torch.float64), counts_M3[chosen_C], ids_C, failed_C,
            vocab_size, block, num_warps=max(1, block // 256),
        )  # fmt: skip
        ids[chosen_C] = ids_C
        # `failed` is of the raw logits so far; a row that fails only with its mask has no token left
        failed[chosen_C] = torch.where(failed[chosen_C] == 0, _MASKED_OUT * failed_C, failed[chosen_C])

    def _draw_on_host(
        self, batch: StepBatch, rows: list[int], logits_MV: torch.Tensor, places: list[int], ids: torch.Tensor
    ) -> None:
        """Replace the draws of rows that the device cannot draw: with penalties, biases, bans, a forced token, or a
        sampling field that `draw_kernel` does not apply."""
        wanted: set[int] = set()
        if batch.processing is not None:
            wanted.update(batch.processing.rows)
        if LEFT_TO_ORACLE:
            wanted.update(row for row in rows if sets_any(batch.sampling[row], LEFT_TO_ORACLE))
        if not wanted:
            return
        chosen = [index for index, row in enumerate(rows) if row in wanted]
        logits = logits_MV[[places[index] for index in chosen]].cpu().numpy()
        drawn = (self._draw or draw)(batch, [rows[index] for index in chosen], logits)
        # rows with None are marked in `failed`, or in the batch's failures
        ids[chosen] = torch.tensor([token_id or 0 for token_id in drawn], dtype=torch.int32, device=ids.device)
