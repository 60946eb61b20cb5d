"""Which format a folder of safetensors files has, by the config's `quantization_config`.

`weights.py` calls `find_matrices`. A format is added here, with a reader of its own beside it.

What must always hold: a checkpoint that says that it is quantized is read by the reader of that format or refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import attrs

from .awq import read_awq
from .compressed_tensors import read_compressed_tensors
from .files import StoredTensor
from .fp8 import read_fp8
from .stacked_experts import read_mxfp4, read_stacked
from .stored_matrices import StoredMatrix


def _entries(*names: str) -> frozenset[str]:
    return frozenset(" ".join(names).split()) | {"quant_method", "modules_to_not_convert", "dequantize"}


ENTRIES = {
    "compressed-tensors": _entries(
        "config_groups format ignore kv_cache_scheme sparsity_config transform_config",
        "global_compression_ratio quantization_status version",
    ),
    "awq": _entries(
        "bits w_bit group_size q_group_size zero_point version",
        # how AutoAWQ and GPTQModel found the weights, and which kernels they call
        "backend do_fuse fuse_max_seq_len modules_to_fuse exllama_config max_input_length use_exllama",
        "meta method dataset tokenizer damp_percent true_sequential batch_size model_seqlen pad_token_id",
        "cache_block_outputs block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize",
    ),
    "fp8": _entries("fmt activation_scheme weight_block_size ignored_layers scale_fmt"),
    "mxfp4": _entries(),
}
"""Entries of `quantization_config` by `quant_method`: those that are read or checked, and those that change nothing."""
_OF_GROUPS = frozenset(("targets", "weights", "input_activations", "output_activations", "format"))
_OF_NUMBERS = frozenset(
    (
        *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
        *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
    )
)
"""Entries of the groups of `compressed-tensors`, and of what is said of numbers in them."""
METHODS = tuple(ENTRIES)
_ONLY_OF = {"mxfp4": ("GptOssForCausalLM",)}
"""Architectures whose checkpoints a method is of; the others are of all."""

_log = logging.getLogger(__name__)


@attrs.frozen
class Matrices:
    """What of a checkpoint is not stored as plain numbers."""

    by_name: Mapping[str, StoredMatrix] = attrs.field(factory=dict)
    activations: str | None = None
    """`int8` if it was made for activations of that type."""


def methods_of(architecture: str) -> list[str]:
    """Return the values of `quant_method` that an architecture's checkpoints may have."""
    return [method for method in METHODS if architecture in _ONLY_OF.get(method, (architecture,))]


def find_unknown(config: object) -> list[str]:
    """Return the entries of a `quantization_config` that are not understood, with dots between the levels of a path.

    Of a method that is not known, which `find_matrices` refuses, there are none.
    """
    if not isinstance(config, dict) or (method := str(config.get("quant_method"))) not in ENTRIES:
        return []
    levels: list[tuple[str, Any, frozenset[str]]] = [("", config, ENTRIES[method])]
    groups = config.get("config_groups") if method == "compressed-tensors" else None
    for name, group in groups.items() if isinstance(groups, dict) else ():
        at = f"config_groups.{name}."
        levels.append((at, group, _OF_GROUPS))
        if isinstance(group, dict):
            levels += [(f"{at}{part}.", group.get(part), _OF_NUMBERS) for part in ("weights", "input_activations")]
    return sorted(
        f"{at}{name}"
        for at, entries, known in levels
        if isinstance(entries, dict)
        for name, value in entries.items()
        if value is not None and name not in known
    )


def find_matrices(config_json: Mapping[str, Any], stored: Mapping[str, StoredTensor], dtype: str) -> Matrices:
    """Return the matrices of a checkpoint that are quantized or stacked.

    `dtype` is the one that it is read as. Raises ValueError naming a format, or an entry of it, that is not supported.
    """
    config, stacked = config_json.get("quantization_config"), read_stacked(stored)
    if not config:
        return Matrices(stacked)
    method = config.get("quant_method") if isinstance(config, dict) else config
    if not isinstance(config, dict) or method not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(f"config.json: quantization_config: quant_method {method!r} is not supported, only {known}")
    if method == "compressed-tensors":
        found, activations = read_compressed_tensors(config, stored)
        return Matrices(stacked | found, activations)
    if method == "mxfp4":
        return Matrices(stacked | read_mxfp4(stored))
    if method == "awq":
        return Matrices(stacked | read_awq(config, stored))
    matrices = read_fp8(config, stored)
    count = sum(math.prod(matrix.shape) for matrix in matrices.values())
    _log.info(
        "%d matrices in FP8 (%.2f GiB) are read as %s and take %.2f GiB, or %.2f GiB with --quantization int8",
        *(len(matrices), count / 2**30, dtype, count * (4 if dtype == "float32" else 2) / 2**30, count / 2**30),
    )
    return Matrices(stacked | matrices)
