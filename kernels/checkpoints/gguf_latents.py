"""Reading what makes keys and values of latents, which newer GGUF files have in two tensors.

`gguf_tensors.py` makes a `LatentMatrix` of both: the rows of a head are those of its keys, stored `[head, latent,
key]`, and those of its values, stored `[head, value, latent]`.

What must always hold: the rows are those of the checkpoint that the file was made from.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from .files import MappedFiles, StoredTensor
from .gguf_file import BLOCKS, GgufTensor
from .gguf_types import DECODERS


@attrs.frozen
class LatentMatrix:
    """Implements `StoredMatrix`."""

    shape: tuple[int, ...]
    keys: StoredTensor
    values: StoredTensor
    types: tuple[str, str]
    sizes: tuple[int, int]
    """Rows of a head: of keys, and of values."""

    layout = None
    format = None

    @classmethod
    def of(cls, keys: GgufTensor, values: GgufTensor, raw_keys: StoredTensor, raw_values: StoredTensor) -> LatentMatrix:
        """Raises ValueError naming a tensor whose shape does not fit the other's."""
        if len(keys.shape) != 3 or len(values.shape) != 3:
            raise ValueError(
                f"tensor {keys.name} has shape {keys.shape}, {values.name} {values.shape}: must be of heads"
            )
        heads, width, key = keys.shape
        if (values.shape[0], values.shape[2]) != (heads, width):
            raise ValueError(f"tensor {values.name} has shape {values.shape}, must be ({heads}, ..., {width})")
        shape = (heads * (key + values.shape[1]), width)
        return cls(shape, raw_keys, raw_values, (keys.type, values.type), (key, values.shape[1]))

    @property
    def stored(self) -> Sequence[StoredTensor]:
        return [self.keys, self.values]

    def rows(self, files: MappedFiles, first: int, count: int) -> torch.Tensor:
        each = sum(self.sizes)
        heads = range(first // each, (first + count - 1) // each + 1)
        rows_OI = torch.cat([self._head(files, head) for head in heads])
        start = first - heads.start * each
        return rows_OI[start : start + count]

    def _head(self, files: MappedFiles, head: int) -> torch.Tensor:
        keys_KI = _read(files, self.keys, head, self.types[0]).t()
        return torch.cat([keys_KI, _read(files, self.values, head, self.types[1])])


def _read(files: MappedFiles, tensor: StoredTensor, head: int, kind: str) -> torch.Tensor:
    rows = files.rows(tensor, head, 1)[0]
    if kind not in DECODERS:
        return rows.float()
    return DECODERS[kind].decode(rows.reshape(rows.shape[0], -1, BLOCKS[kind][1])).dequantized()
