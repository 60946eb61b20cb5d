"""`--quantization`: weights that a checkpoint holds as plain numbers, quantized while they are read.

Matrices of layers, experts included, take the requested layout; the embedding and the output head 8 bits and one scale
a row, since errors there cost the most; routers, norms, biases and what the checkpoint has quantized stay as they are.

What must always hold: a row's codes depend on that row only, so pieces of any size are quantized alike.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import attrs
import torch

from .quantized import QuantizedLayout, QuantizedRows, quantize
from .scratch import Scratch
from .sources import Shape, Source
from .stored_matrices import layout_name

QUANTIZATIONS = ("int8", "int4", "int4-g32", "int4-g128")
"""Values of `--quantization`: one scale a row, or one for each group of inputs; `int4` has groups of 32."""

_LINEAR = re.compile(
    r"\.((q|k|v|o|gate|up|down|qkv|gate_up|q_a|q_b|c)_proj|c_fc|kv_a_proj_with_mqa|w[123]|(in|out)put_linear)\.weight$"
)
_TABLES = ("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight", "lm_head.weight")

_log = logging.getLogger(__name__)


@attrs.frozen
class Quantization:
    """Which matrices are quantized, and how."""

    bits: int
    group_size: int | None
    """None: one scale a row."""

    @classmethod
    def parse(cls, name: str) -> Quantization:
        """Read a value of `--quantization`. Raises ValueError for an unknown one."""
        if name not in QUANTIZATIONS:
            raise ValueError(f"unknown quantization {name!r}: choose {', '.join(map(repr, QUANTIZATIONS))}")
        bits, _, group_size = name.removeprefix("int").partition("-g")
        return cls(int(bits), int(group_size or 32) if bits == "4" else None)

    def layout(self, name: str, shape: Shape) -> QuantizedLayout | None:
        """Return the layout of a tensor; None: it stays as it is, also if the groups do not divide its rows."""
        if len(shape) != 2:
            return None
        width = shape[1]
        if name in _TABLES:
            return QuantizedLayout(8, width, has_offsets=False)
        if not is_linear(name):
            return None
        group_size = self.group_size or width
        return None if width % group_size else QuantizedLayout(self.bits, group_size, has_offsets=False)


def is_linear(name: str) -> bool:
    """Return whether a tensor is a matrix of a layer's attention, MLP or experts."""
    return _LINEAR.search(name) is not None


class QuantizingSource:
    """Implements `Source` of `sources.py` on top of another."""

    def __init__(self, source: Source, quantization: Quantization, dtype: torch.dtype) -> None:
        self._source = source
        self._dtype = dtype
        self._read = Scratch()
        self._layouts: dict[str, tuple[QuantizedLayout, Shape]] = {}
        kept = []
        for name, shape in source.shapes.items():
            if source.layout(name) is not None:
                continue
            layout = quantization.layout(name, shape)
            if layout is not None:
                self._layouts[name] = layout, shape
            elif is_linear(name):
                kept.append(name)
        if kept:
            _log.warning(
                "%d matrices are not quantized, because groups of %s do not divide their rows: %s",
                *(len(kept), quantization.group_size, ", ".join(sorted(kept)[:3])),
            )

    def check(self, name: str, shape: Shape) -> None:
        self._source.check(name, shape)

    def copy(self, name: str, first: int, out: torch.Tensor) -> None:
        if name not in self._layouts:
            self._source.copy(name, first, out)
            return
        width = self._layouts[name][1][1]
        rows = self.rows(name, first // width, len(out) // width)
        out.copy_(rows.dequantized().view(-1).to(self._dtype))

    def layout(self, name: str) -> QuantizedLayout | None:
        return self._layouts[name][0] if name in self._layouts else self._source.layout(name)

    def rows(self, name: str, first: int, count: int) -> QuantizedRows:
        if name not in self._layouts:
            return self._source.rows(name, first, count)
        layout, (_, width) = self._layouts[name]
        read = self._read.take(count * width, self._dtype)
        self._source.copy(name, first * width, read)
        return quantize(read.view(count, width), layout)

    def format(self, name: str) -> str:
        if name in self._layouts:
            layout, shape = self._layouts[name]
            return layout_name(layout, shape[1])
        return self._source.format(name)

    def check_all_used(self, ignore: frozenset[str]) -> None:
        self._source.check_all_used(ignore)
        self._read = Scratch()

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._source.shapes
