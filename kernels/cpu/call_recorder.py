"""What recording an operation takes: the values that a model's small tensors stand for, and the memory of its weights.

`row_recorder.py` and `recorder.py` record the operations themselves.

What must always hold: every value that a model computes comes from a recorded call. A tensor computed by torch does
not, and using it raises an error at load.
"""

from __future__ import annotations

from typing import Any

import torch

from . import program
from .packing import Packed, PackedWeights
from .recorded import Place, RecordedOp, Values

ROWS = 2  # with one row, the stride between rows would be undefined


class CallRecorder:
    """Records calls and the values that they read and write."""

    def __init__(self, weights: PackedWeights) -> None:
        self._weights = weights
        self.recorded: list[RecordedOp] = []
        self.values = Values()
        self.memory: list[torch.Tensor | Packed] = []
        self._value_of: dict[int, tuple[int, torch.Tensor]] = {}  # by address of the small tensor
        self._head = False

    def start_head(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Gather the rows of the selected tokens from `x_ND`; all later operations work on these."""
        self._head = True
        return self._record(program.GATHER, x=x_ND, shape=(x_ND.shape[1],), width=x_ND.shape[1])

    def _record(
        self,
        kind: int,
        *,
        shape: tuple[int, ...],
        x: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        also: dict[str, int] | None = None,
        **fields: Any,
    ) -> torch.Tensor:
        """Record a call; return the tensor that represents its result."""
        result = torch.empty(ROWS, *shape)
        value = self.values.add(result[0].numel(), on_logits_rows=self._head)
        # an empty result (write_kv) has no address, and cannot be used
        if result.numel():
            self._value_of[result.untyped_storage().data_ptr()] = (value, result)
        fields |= {"kind": kind, "on_logits_rows": self._head, "no_barrier": False, **(also or {})}
        self.recorded.append(RecordedOp(fields, self._place(x), self._place(z), Place(value, 0), self._place(v)))
        return result

    def _place(self, tensor: torch.Tensor | None) -> Place | None:
        if tensor is None:
            return None
        value, whole = self._value_of.get(tensor.untyped_storage().data_ptr(), (-1, tensor))
        inner = tensor[0]
        if value < 0 or tensor.stride(0) != whole.stride(0) or not inner.is_contiguous():
            raise ValueError("the model computes something outside of Ops, or reshapes results across rows")
        return Place(value, int(tensor.storage_offset()))

    def _vector(self, tensor: torch.Tensor) -> int:
        """Return the address of a float32 copy of a vector or table."""
        tensor = tensor.float().contiguous()
        self.memory.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, placeholder: torch.Tensor) -> dict[str, int]:
        matrix = self._weights.matrix(placeholder)
        self.memory.append(matrix)
        return {"weight": matrix.address, "stored": matrix.stored}

    def _matrices(self, placeholders: list[torch.Tensor]) -> dict[str, int]:
        matrices = [self._matrix(placeholder) for placeholder in placeholders]
        if len({matrix["stored"] for matrix in matrices}) > 1:
            raise ValueError("some experts of a layer are quantized and others are not: that is not supported")
        addresses = torch.tensor([matrix["weight"] for matrix in matrices], dtype=torch.int64)
        self.memory.append(addresses)
        return {"matrices": addresses.data_ptr(), "stored": matrices[0]["stored"]}
