"""Where a model's tensors come from: a folder of safetensors files, or random numbers in their shape.

A family's constructor asks for one tensor after another by name and shape; the backend makes the source and calls
`check_all_used` after it. Tensors are read one by one and copied into memory of their own, so at most one tensor
exists twice, and every weight lies as torch aligns it rather than wherever its file's header happened to end.

What must always hold: a tensor is returned in the shape asked for, rounded to the source's one dtype and held in
whichever the backend computes in, or a ValueError names it; and no tensor of a checkpoint is silently left out.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""What weights and KV may be made of, by the name in configurations."""

_STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_DUMMY_STD = 0.02
# A prime: no row length is a multiple of it, so tiling the block makes no two rows of a matrix alike.
_DUMMY_BLOCK = 65_537

Shape = tuple[int, ...]


class Weights(Protocol):
    """A source of tensors."""

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """A fresh tensor. Raises ValueError naming it where it is missing or does not fit."""
        ...

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        """Several tensors, one below the other along the first dimension."""
        ...

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        """Raises ValueError naming tensors that nobody asked for, other than the ignored."""
        ...


def open_weights(
    model_path: Path, config_json: dict[str, Any], *, load_format: str, dtype: str, held_in: torch.dtype | None = None
) -> tuple[Weights, torch.dtype]:
    """The source for a checkpoint, and the dtype that all its tensors are rounded to.

    `dtype` `auto` is what config.json says (`dtype`, or `torch_dtype` as it used to be called), else what the file's
    first tensor is stored in (float32 for a dummy). `held_in` is a wider dtype to return them in, for backends that do
    not compute in the model's own. Raises ValueError for an unknown dtype or load format, and for a
    folder without readable weights.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"unknown load_format {load_format!r}: choose 'auto' or 'dummy'")
    stored = None if load_format == "dummy" else _find_tensors(model_path)
    name = dtype if dtype != "auto" else config_json.get("dtype") or config_json.get("torch_dtype")
    if name is None:
        name = "float32" if stored is None else _stored_dtype(*next(iter(stored.items())))
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported: choose {', '.join(DTYPES)}")
    rounded = DTYPES[name]
    if stored is None:
        return DummyWeights(rounded, held_in or rounded), rounded
    return SafetensorsWeights(stored, rounded, held_in or rounded), rounded


class SafetensorsWeights:
    """Tensors of one checkpoint, from as many files as it has."""

    def __init__(self, files: dict[str, Path], dtype: torch.dtype, held_in: torch.dtype) -> None:
        """`files` says which file holds each tensor."""
        self._files = files
        self._dtype = dtype
        self._held_in = held_in
        self._used: set[str] = set()

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        path = self._files.get(name)
        if path is None:
            raise ValueError(f"checkpoint lacks tensor {name}")
        try:
            with safe_open(path, framework="pt") as file:
                stored = file.get_slice(name)
                if tuple(stored.get_shape()) != shape:
                    raise ValueError(f"tensor {name} has shape {tuple(stored.get_shape())}, config.json says {shape}")
                _check_stored_dtype(name, stored.get_dtype())
                tensor: torch.Tensor = file.get_tensor(name).to(self._dtype).to(self._held_in, copy=True)
        except SafetensorError as error:
            raise ValueError(f"tensor {name} cannot be read from {path.name}: {error}") from None
        self._used.add(name)
        return tensor

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        return torch.cat([self.tensor(name, shape) for name, shape in parts])

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        # Rotary frequencies stand in some older checkpoints; they follow from the config.
        unused = sorted(n for n in self._files.keys() - self._used - ignore if not n.endswith("rotary_emb.inv_freq"))
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise ValueError(f"checkpoint holds tensors that the model has no place for: {', '.join(unused[:3])}{more}")


class DummyWeights:
    """Random tensors, the same for the same name on every run: for benchmarks that need shapes, not sense."""

    def __init__(self, dtype: torch.dtype, held_in: torch.dtype) -> None:
        self._dtype = dtype
        self._held_in = held_in

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._held_in)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
        block = np.random.default_rng(seed).standard_normal(_DUMMY_BLOCK, dtype=np.float32) * np.float32(_DUMMY_STD)
        # Tiling one block fills a billion numbers in the time that memory takes; drawing them takes twenty times that.
        size = int(np.prod(shape))
        tensor = torch.empty(size, dtype=self._held_in)
        source = torch.from_numpy(block).to(self._dtype)
        for start in range(0, size, _DUMMY_BLOCK):
            tensor[start : start + _DUMMY_BLOCK] = source[: size - start]
        return tensor.view(shape)

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        return torch.cat([self.tensor(name, shape) for name, shape in parts])

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        pass


def _find_tensors(model_path: Path) -> dict[str, Path]:
    """The file of every tensor: by the index of a sharded checkpoint, else from the one file's header."""
    index = model_path / "model.safetensors.index.json"
    single = model_path / "model.safetensors"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            files = {str(name): model_path / Path(file).name for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index.name} is no index of a sharded checkpoint") from None
        missing = sorted({file.name for file in files.values() if not file.is_file()})
        if missing:
            raise ValueError(f"checkpoint lacks file {missing[0]}, which {index.name} names")
    elif single.is_file():
        try:
            with safe_open(single, framework="pt") as file:
                files = dict.fromkeys(file.keys(), single)
        except SafetensorError as error:
            raise ValueError(f"{single.name} cannot be read: {error}") from None
    else:
        raise ValueError(f"{model_path} holds neither {single.name} nor {index.name}")
    if not files:
        raise ValueError(f"{model_path} holds no tensors")
    return files


def _stored_dtype(name: str, path: Path) -> str:
    with safe_open(path, framework="pt") as file:
        stored = file.get_slice(name).get_dtype()
    _check_stored_dtype(name, stored)
    return _STORED_DTYPES[stored]


def _check_stored_dtype(name: str, stored: str) -> None:
    if stored not in _STORED_DTYPES:
        raise ValueError(f"tensor {name} is stored as {stored}: only {', '.join(_STORED_DTYPES)} can be read")
