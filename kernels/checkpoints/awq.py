"""Reading AWQ checkpoints (Lin et al., arXiv:2306.00978) in the layout `gemm` of AutoAWQ.

`formats.py` calls `read_awq` for `quant_method: awq`. A module `X` has `X.qweight`, `X.qzeros` and `X.scales`, each
with a row for every input, or every group of inputs: the transpose of what models use. A 32-bit word holds eight
outputs, the even ones in its lower half.

What must always hold: codes and zeros are shifted alike, so their differences are those of the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from .files import STORED_DTYPES, MappedFiles, StoredTensor
from .packed_words import unpack_nibbles
from .quantized import QuantizedLayout, QuantizedRows
from .stored_matrices import StoredMatrix

_PER_WORD = 8
_NIBBLES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""The nibble of a word that holds each of its outputs."""


@attrs.frozen
class AwqMatrix:
    """Implements `StoredMatrix`."""

    format = None
    shape: tuple[int, ...]
    layout: QuantizedLayout
    qweight: StoredTensor
    qzeros: StoredTensor
    scales: StoredTensor

    @property
    def stored(self) -> Sequence[StoredTensor]:
        return [self.qweight, self.qzeros, self.scales]

    def rows(self, files: MappedFiles, first: int, count: int) -> QuantizedRows:
        codes_OI = _columns(files, self.qweight, first, count)
        zeros_OG = _columns(files, self.qzeros, first, count)
        scales_GO = files.rows(self.scales, 0, self.scales.shape[0])
        scales_OG = scales_GO[:, first : first + count].t().float().contiguous()
        if first + count == self.shape[0]:
            files.drop(self.qweight, 0, self.qweight.shape[0] * self.qweight.shape[1])
        return QuantizedRows(codes_OI, scales_OG, zeros_OG)


def _columns(files: MappedFiles, packed: StoredTensor, first: int, count: int) -> torch.Tensor:
    """Return unpacked columns from `first` on, as rows."""
    start, end = first // _PER_WORD, -(-(first + count) // _PER_WORD)
    words_IW = files.rows(packed, 0, packed.shape[0])[:, start:end].contiguous()
    codes_IW8 = unpack_nibbles(words_IW).view(packed.shape[0], -1, _PER_WORD)[..., _NIBBLES]
    skipped = first - start * _PER_WORD
    return codes_IW8.view(packed.shape[0], -1)[:, skipped : skipped + count].t().contiguous()


def read_awq(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> dict[str, StoredMatrix]:
    """Return the quantized matrices by name. Raises ValueError naming what is not supported."""
    for entry, names, allowed in (
        ("version", ("version",), "gemm"),
        ("bits", ("bits", "w_bit"), 4),
        ("zero_point", ("zero_point",), True),
    ):
        value = next((config[name] for name in names if name in config), None)
        value = value.lower() if isinstance(value, str) else value
        if value != allowed:
            raise ValueError(f"config.json: quantization_config.{entry} {value!r} is not supported, only {allowed!r}")
    group_size = next((config[name] for name in ("group_size", "q_group_size") if name in config), None)
    found: dict[str, StoredMatrix] = {}
    for name, qweight in stored.items():
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            matrix = _read_matrix(module, qweight, stored)
            width = matrix.shape[1]
            if group_size is not None and matrix.layout.group_size != (width if group_size == -1 else group_size):
                raise ValueError(
                    f"tensors of {module} have groups of {matrix.layout.group_size}, but config.json: "
                    f"quantization_config.group_size is {group_size!r}"
                )
            found[f"{module}.weight"] = matrix
    return found


def _read_matrix(module: str, qweight: StoredTensor, stored: Mapping[str, StoredTensor]) -> AwqMatrix:
    parts = []
    for part in ("qzeros", "scales"):
        tensor = stored.get(f"{module}.{part}")
        if tensor is None:
            raise ValueError(f"checkpoint lacks tensor {module}.{part}")
        parts.append(tensor)
    qzeros, scales = parts
    if any(len(tensor.shape) != 2 or 0 in tensor.shape for tensor in (qweight, qzeros, scales)):
        raise ValueError(f"tensors of {module} must be matrices")
    width, words = qweight.shape
    num_groups, rows = scales.shape
    if (
        (qweight.dtype, qzeros.dtype) != ("I32", "I32")
        or scales.dtype not in STORED_DTYPES
        or rows != words * _PER_WORD
        or qzeros.shape != (num_groups, words)
        or width % num_groups
    ):
        raise ValueError(
            f"tensors of {module} do not fit each other: qweight {qweight.shape}, qzeros {qzeros.shape}, "
            f"scales {scales.shape}"
        )
    layout = QuantizedLayout(4, width // num_groups, has_offsets=True)
    return AwqMatrix((rows, width), layout, qweight, qzeros, scales)
