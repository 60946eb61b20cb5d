"""Reading compressed-tensors checkpoints, as llm-compressor writes them: `pack-quantized` and `int-quantized`.

`formats.py` calls `read_compressed_tensors` for `quant_method: compressed-tensors`. A module `X` has `X.weight_packed`,
nibbles or bytes in 32-bit words, with `X.weight_shape`; or `X.weight` in int8; and `X.weight_scale`, and
`X.weight_zero_point` if it is not symmetric, which is packed along the rows if the weights are packed.

What must always hold: how a matrix is stored agrees with one of the config's groups, and whatever in the config changes
what is computed is either computed or refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from .files import STORED_DTYPES, MappedFiles, StoredTensor
from .packed_words import unpack_bytes, unpack_nibbles
from .quantized import BITS, QuantizedLayout, QuantizedRows
from .stored_matrices import StoredMatrix

_log = logging.getLogger(__name__)

_FORMATS = ("pack-quantized", "int-quantized")
_NONE: tuple[Any, ...] = (None, False, {}, [], "dense")


@attrs.frozen
class _Scheme:
    """How a group's weights are quantized."""

    bits: int
    group_size: int | None
    """None: one scale a row."""
    is_symmetric: bool


@attrs.frozen(kw_only=True)
class CompressedMatrix:
    """Implements `StoredMatrix`."""

    format = None
    shape: tuple[int, ...]
    layout: QuantizedLayout
    weight: StoredTensor
    scale: StoredTensor
    zero_point: StoredTensor | None
    shape_tensor: StoredTensor | None
    """None: the weights are not packed."""

    @property
    def stored(self) -> Sequence[StoredTensor]:
        parts = (self.weight, self.scale, self.zero_point, self.shape_tensor)
        return [part for part in parts if part is not None]

    def rows(self, files: MappedFiles, first: int, count: int) -> QuantizedRows:
        codes_OI = files.rows(self.weight, first, count)
        if self.shape_tensor is not None:
            codes_OI = _unpack(codes_OI, self.layout.bits)[:, : self.shape[1]].contiguous()
        else:
            codes_OI = codes_OI.clone()
        scales_OG = files.rows(self.scale, first, count).float()
        files.drop(self.weight, first * self.weight.shape[1], count * self.weight.shape[1])
        return QuantizedRows(codes_OI, scales_OG, self._zeros(files, first, count))

    def _zeros(self, files: MappedFiles, first: int, count: int) -> torch.Tensor | None:
        if self.zero_point is None:
            return None
        if self.shape_tensor is None:
            return files.rows(self.zero_point, first, count).clone()
        per_word = 32 // self.layout.bits
        words = range(first // per_word, -(-(first + count) // per_word))
        packed_WG = files.rows(self.zero_point, words.start, len(words))
        # a view in bytes needs the usual strides even where there is only one word
        packed_GW = packed_WG.t().clone(memory_format=torch.contiguous_format)
        skipped = first - words.start * per_word
        return _unpack(packed_GW, self.layout.bits)[:, skipped : skipped + count].t().contiguous()


def read_compressed_tensors(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredMatrix], str | None]:
    """Return the quantized matrices by name, and the type of activations that they were made for, if not float.

    Raises ValueError naming what is not supported.
    """
    schemes, activations = _read_config(config)
    found: dict[str, StoredMatrix] = {}
    for name, tensor in stored.items():
        if name.endswith(".weight_g_idx"):
            raise ValueError(f"tensor {name}: groups in another order than the inputs (g_idx) are not supported")
        if name.endswith(".weight_packed") or (name.endswith(".weight") and tensor.dtype == "I8"):
            module = name.removesuffix("_packed").removesuffix(".weight")
            found[f"{module}.weight"] = _read_matrix(module, tensor, stored, schemes)
    return found, activations


def _read_config(config: Mapping[str, Any]) -> tuple[list[_Scheme], str | None]:
    for entry in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        value = config.get(entry)
        if value not in _NONE and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise ValueError(f"config.json: quantization_config.{entry} is not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()) or not groups:
        raise ValueError("config.json: quantization_config.config_groups must be an object of objects")
    schemes, activations = [], set()
    for name, group in groups.items():
        path = f"config.json: quantization_config.config_groups.{name}"
        form = group.get("format") or config.get("format")
        if form not in _FORMATS:
            raise ValueError(f"{path}: format {form!r} is not supported, only {' and '.join(map(repr, _FORMATS))}")
        schemes.append(_read_scheme(f"{path}.weights", group.get("weights")))
        activations.add(_read_activations(f"{path}.input_activations", group.get("input_activations")))
        if group.get("output_activations") is not None:
            raise ValueError(f"{path}.output_activations is not supported")
    if len(activations) > 1:
        _log.warning("not all groups of weights are made for int8 activations, so none are used")
    return schemes, "int8" if activations == {"int8"} else None


def _read_scheme(path: str, weights: Any) -> _Scheme:
    if not isinstance(weights, dict):
        raise ValueError(f"{path} must be an object")
    for entry, allowed in {
        "type": ("int",),
        "num_bits": BITS,
        "strategy": ("channel", "group"),
        "actorder": (None, False, "weight", "static"),
        "dynamic": (None, False),
    }.items():
        default = "int" if entry == "type" else None
        if weights.get(entry, default) not in allowed:
            shown = ", ".join(repr(one) for one in allowed if one) or "False"
            raise ValueError(f"{path}.{entry} {weights.get(entry)!r} is not supported, only {shown}")
    group_size = weights.get("group_size") if weights["strategy"] == "group" else None
    if weights["strategy"] == "group" and (not isinstance(group_size, int) or group_size < 1):
        raise ValueError(f"{path}.group_size is {group_size!r}, must be a positive integer")
    return _Scheme(weights["num_bits"], group_size, is_symmetric=bool(weights.get("symmetric", True)))


def _read_activations(path: str, inputs: Any) -> str:
    if inputs is None:
        return "float"
    wanted = {"type": "int", "num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
    if not isinstance(inputs, dict):
        raise ValueError(f"{path} must be an object")
    for entry, value in wanted.items():
        if inputs.get(entry) != value:
            raise ValueError(f"{path}.{entry} {inputs.get(entry)!r} is not supported, only {value!r}")
    return "int8"


def _read_matrix(
    module: str, weight: StoredTensor, stored: Mapping[str, StoredTensor], schemes: list[_Scheme]
) -> CompressedMatrix:
    name = f"{module}.weight"
    scale, zero_point = stored.get(f"{name}_scale"), stored.get(f"{name}_zero_point")
    if scale is None:
        raise ValueError(f"checkpoint lacks tensor {name}_scale")
    shape_tensor = stored.get(f"{name}_shape")
    is_packed = weight.name != name
    if is_packed and shape_tensor is None:
        raise ValueError(f"checkpoint lacks tensor {name}_shape")
    if len(weight.shape) != 2 or len(scale.shape) != 2 or scale.dtype not in STORED_DTYPES or 0 in scale.shape:
        raise ValueError(f"tensor {scale.name} has shape {scale.shape} of {scale.dtype}, which is not supported")
    for scheme in schemes:
        matrix = _fit(scheme, weight, scale, zero_point, shape_tensor if is_packed else None)
        if matrix is not None:
            return matrix
    raise ValueError(f"tensor {weight.name} of shape {weight.shape} and its scales agree with no group of config.json")


def _fit(
    scheme: _Scheme,
    weight: StoredTensor,
    scale: StoredTensor,
    zero_point: StoredTensor | None,
    shape_tensor: StoredTensor | None,
) -> CompressedMatrix | None:
    """Return the matrix if it is stored as the scheme says."""
    rows = weight.shape[0]
    if shape_tensor is None:
        if scheme.bits != 8 or weight.dtype != "I8":
            return None
        width = weight.shape[1]
    else:
        with_shape = read_shape(shape_tensor)
        if with_shape is None or weight.dtype != "I32" or with_shape[0] != rows:
            return None
        width = with_shape[1]
        if weight.shape[1] != -(-width * scheme.bits // 32):
            return None
    num_groups = 1 if scheme.group_size is None else width // scheme.group_size
    if scale.shape != (rows, num_groups) or width % num_groups:
        return None
    if (zero_point is None) != scheme.is_symmetric:
        return None
    if zero_point is not None:
        packed = shape_tensor is not None
        expected = (-(-rows * scheme.bits // 32) if packed else rows, num_groups)
        if zero_point.shape != expected or zero_point.dtype != ("I32" if packed else "I8"):
            return None
    return CompressedMatrix(
        shape=(rows, width),
        layout=QuantizedLayout(scheme.bits, width // num_groups, has_offsets=zero_point is not None),
        weight=weight,
        scale=scale,
        zero_point=zero_point,
        shape_tensor=shape_tensor,
    )


def read_shape(tensor: StoredTensor) -> tuple[int, int] | None:
    """Return what a `weight_shape` says; None if it is not the shape of a matrix."""
    if tensor.shape != (2,) or tensor.dtype not in ("I64", "I32"):
        return None
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        read = file.read(tensor.end - tensor.start)
    half = len(read) // 2
    rows, width = (int.from_bytes(part, "little", signed=True) for part in (read[:half], read[half:]))
    return (rows, width) if rows > 0 and width > 0 else None


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    return unpack_nibbles(words) if bits == 4 else unpack_bytes(words)
