"""The settings of how a checkpoint is read. Part of `engine_config.py`, on top of those of speculative decoding."""

from __future__ import annotations

import attrs

from .declarations import setting
from .speculative_settings import SpeculativeSettings


@attrs.frozen(kw_only=True)
class CheckpointSettings(SpeculativeSettings):
    dtype: str = setting(
        "auto",
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="data type of weights; `auto`: the checkpoint's",
    )
    load_format: str = setting(
        "auto",
        "--load-format",
        choices=("auto", "gguf", "dummy"),
        help="`dummy`: random weights in the checkpoint's shapes; `gguf`: the same as `auto`, which finds the format",
    )
    quantization: str | None = setting(
        None,
        "--quantization",
        choices=(
            *("int8", "int4", "int4-g32", "int4-g128"),
            *("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel"),
            *("int8_per_channel_weight_only", "mxfp8", "mxfp4", "nvfp4_per_token"),
        ),
        help="quantize weights while loading: one scale per row, or one per group of 32 (`int4`) or 128 inputs; "
        "embedding and output head as int8 (docs/operate/models.md); from `fp8` on: vLLM's, with `--executor vllm`",
    )
    activations: str = setting(
        "auto",
        "--activations",
        choices=("auto", "float", "int8"),
        help="data type of the activations that quantized weights are multiplied with; `auto`: int8 if the checkpoint "
        "was made for it, else `float`: bfloat16 if the processor multiplies it, else float32, whatever the data type",
    )
    trust_remote_code: bool = setting(
        False,
        "--trust-remote-code",
        help="let `--executor vllm` or `transformers` run Python code from the checkpoint's folder, which may do "
        "whatever the server may",
    )
    ignored_config_entries: tuple[str, ...] | None = setting(
        None,
        "--ignore-config-entries",
        reader="names",
        metavar="NAME,...",
        help="entries of `config.json` that are not understood and yet change no result, so that the model is served "
        "all the same (docs/operate/models.md)",
    )
