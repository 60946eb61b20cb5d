"""Whether transformers can be used here, what of our settings this backend has, and what the library reads at import.

`transformers_loading.py` asks before transformers is imported.

What must always hold: a setting that would be ignored is refused by its name; nothing is sent over a network.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from ..backend import BackendConfig, refuse_int8_activations
from ..kv_cache import KV_DTYPES
from ..models.config import read_config

OLDEST, BEFORE = Version("5.20"), Version("6")
"""Versions whose interfaces of attention and masks are known."""
_DEFAULTS = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}


def settle_environment() -> None:
    """Set what transformers reads when it is imported. What the operator has set stays."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def check_installed(version_of: Callable[[str], str] = version) -> str:
    """Return the version of transformers that is installed. Raises ValueError if there is none, or another one."""
    needed = f"the transformers executor needs transformers {OLDEST} or later, below {BEFORE}"
    try:
        found = version_of("transformers")
    except PackageNotFoundError:
        raise ValueError(f"{needed}, which is not installed (pip install './quipu_llm-….whl[transformers]')") from None
    if not OLDEST <= Version(found) < BEFORE:
        raise ValueError(f"{needed}, and {found} is installed")
    return found


def check_settings(config: BackendConfig) -> None:
    """Raises ValueError for a setting that this backend does not have."""
    if config.determinism not in ("auto", "fast", "strict"):
        raise ValueError(f"unknown determinism {config.determinism!r}: choose 'strict', 'fast' or 'auto'")
    if config.determinism == "strict":
        raise ValueError(
            "--determinism strict: the bits of transformers' results depend on the batch and the chunks; use the cpu "
            "or the triton executor"
        )
    refuse_int8_activations(config.activations, "transformers")
    if config.quantization is not None:
        raise ValueError(f"--quantization {config.quantization}: the transformers executor quantizes no weights")
    if config.kv_cache_dtype != "auto" and config.kv_cache_dtype not in KV_DTYPES:
        raise ValueError(f"unknown kv_cache_dtype {config.kv_cache_dtype!r}: choose 'auto'")
    if config.kv_cache_dtype == "int8":
        raise ValueError("--kv-cache-dtype int8: the transformers executor keeps keys and values as they are: use auto")
    if config.load_format not in ("auto", "dummy"):
        raise ValueError(
            f"--load-format {config.load_format}: the transformers executor reads safetensors (auto), or dummy"
        )
    if config.headless:
        raise ValueError("--task: the transformers executor makes no embeddings and no scores, only text")


def dtype_of(config: BackendConfig) -> str:
    """Return the data type of the weights: by `auto` the checkpoint's own, or float32 if it does not say."""
    if config.dtype != "auto":
        return config.dtype
    entries = read_config(config.model_path)
    name = str(entries.get("dtype") or entries.get("torch_dtype") or "float32").removeprefix("torch.")
    if name == "float16" and entries.get("quantization_config"):
        return "bfloat16"
    return name if name in KV_DTYPES else "float32"
