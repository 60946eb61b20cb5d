"""Small quantized checkpoints, written as the formats' own tools write them, and the numbers that those say they hold.

Imported by the tests of readers. `compressed-tensors` is the oracle of its own format; AutoAWQ cannot be installed
beside these versions, so its packing is repeated here, a nibble at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

Tensors = dict[str, torch.Tensor]

AWQ_CONFIG = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 16, "zero_point": True}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def scheme_of(bits: int, group_size: int | None, *, symmetric: bool, int8_inputs: bool = False) -> QuantizationScheme:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group_size else "channel",
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return QuantizationScheme(
        targets=["Linear"],
        weights={**weights, **({"group_size": group_size} if group_size else {})},
        input_activations=inputs if int8_inputs else None,
    )


def compressed_config(scheme: QuantizationScheme, form: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
    }


def compress(
    module: str, shape: tuple[int, int], scheme: QuantizationScheme, form: str, dtype: torch.dtype
) -> tuple[Tensors, torch.Tensor]:
    """Return a module's stored tensors, and its weight as the library decompresses them."""
    weights = scheme.weights
    assert weights is not None
    rows, width = shape
    num_groups = width // weights.group_size if weights.group_size else 1
    top = 2 ** (weights.num_bits - 1)
    state: Tensors = {
        "weight": torch.randn(shape).to(dtype),
        "weight_scale": (torch.rand(rows, num_groups) * 2 / top + 0.01).to(dtype),
        "weight_zero_point": torch.randint(-top, top, (rows, num_groups), dtype=torch.int8),
    }
    if weights.symmetric:
        state["weight_zero_point"].zero_()
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    weight = compressor.decompress(stored, scheme)["weight"]
    return {f"{module}.{name}": tensor.contiguous() for name, tensor in stored.items()}, weight


def pack_awq(module: str, shape: tuple[int, int], group_size: int = 16) -> tuple[Tensors, torch.Tensor]:
    """Return a module's stored tensors as AutoAWQ packs them, and its weight in float16."""
    rows, width = shape
    codes_IO = torch.randint(0, 16, (width, rows), dtype=torch.int32)
    zeros_GO = torch.randint(0, 16, (width // group_size, rows), dtype=torch.int32)
    scales_GO = (torch.rand(width // group_size, rows) * 0.1 + 0.01).half()

    def pack(values: torch.Tensor) -> torch.Tensor:
        words = torch.zeros(values.shape[0], rows // 8, dtype=torch.int32)
        for word in range(rows // 8):
            for nibble, column in enumerate(_AWQ_ORDER):
                words[:, word] |= values[:, word * 8 + column] << (4 * nibble)
        return words

    spread = [values.repeat_interleave(group_size, dim=0) for values in (zeros_GO, scales_GO)]
    weight_IO = (codes_IO - spread[0]).half() * spread[1]
    stored = {"qweight": pack(codes_IO), "qzeros": pack(zeros_GO), "scales": scales_GO}
    return {f"{module}.{name}": tensor for name, tensor in stored.items()}, weight_IO.t().contiguous()


def store_fp8(module: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
    """Return a module's stored tensors in blocks of 128, and its weight in float32."""
    rows, width = shape
    stored = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 128), -(-width // 128)) * 1e-3
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :width]
    return {f"{module}.weight": stored, f"{module}.weight_scale_inv": scale}, stored.float() * spread
