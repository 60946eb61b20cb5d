"""A checkpoint's tensors on the device. Each is read on the host and moved before the next is read."""

from __future__ import annotations

import torch

from ..checkpoints.weights import Shape, Weights


class DeviceWeights:
    """Implements `quipu.kernels.checkpoints.weights.Weights`; keeps one matrix of each shape for `probe.py`."""

    def __init__(self, source: Weights, device: torch.device) -> None:
        self._source = source
        self._device = device
        self.matrices: dict[Shape, torch.Tensor] = {}

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        return self._moved(self._source.tensor(name, shape))

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        return self._moved(self._source.fused(parts))

    @property
    def num_bytes(self) -> int:
        return self._source.num_bytes

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        self._source.check_all_used(ignore=ignore)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(self._device)
        if moved.dim() == 2:
            self.matrices.setdefault(tuple(moved.shape), moved)
        return moved
