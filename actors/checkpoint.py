"""What the web side has to know of a checkpoint, read from its JSON files without torch.

Used by `web/cli.py` when it resolves the server's sizes. What must always hold: nothing here opens a weight file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

DEMO = Path(__file__).resolve().parent.parent / "kernels" / "demo"
"""The checkpoint that ships with the package."""

_DTYPES = ("bfloat16", "float16", "float32")


class CheckpointError(ValueError):
    """The model cannot be served; the message says why. Nothing was loaded."""


@attrs.frozen
class CheckpointInfo:
    path: Path
    name: str
    """As a client may ask for it."""
    max_model_len: int
    """Tokens that the model was made for."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str


def resolve(model: str) -> Path:
    """The folder of `model`: `demo`, a folder, or a repository of the Hugging Face hub, which is downloaded.

    Raises CheckpointError.
    """
    if model == "demo":
        return DEMO
    path = Path(model)
    if path.is_dir():
        return path.resolve()
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(f"model {model!r} is neither a folder nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model {model!r} is no folder here and could not be fetched from the hub: {error}"
        ) from error


def read_info(path: Path, *, name: str | None = None, dtype: str = "auto") -> CheckpointInfo:
    """Read config.json and generation_config.json of the checkpoint in `path`. Raises CheckpointError."""
    config = _read_json(path / "config.json")
    try:
        max_model_len = _longest(config)
        vocab_size = _positive(config, "vocab_size")
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / 'config.json'}: {type(error).__name__} at {error}") from error
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not supported: choose {', '.join(_DTYPES)}")
    generation = path / "generation_config.json"
    eos = _as_ids(config.get("eos_token_id"))
    if generation.exists():
        eos += _as_ids(_read_json(generation).get("eos_token_id"))
    return CheckpointInfo(
        path=path,
        name=name or path.name,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype=dtype,
    )


def _positive(config: dict[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json: {key} is {value!r}, where a positive integer is needed")
    return value


def _longest(config: dict[str, Any]) -> int:
    """Tokens of a context. YaRN multiplies what was trained, which configs often leave as `max_position_embeddings`."""
    longest = _positive(config, "max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) == "yarn" and "original_max_position_embeddings" in rope:
        longest = max(longest, int(rope["factor"] * rope["original_max_position_embeddings"]))
    return longest


def _as_ids(value: object) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(str(value))]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: not a checkpoint in the Hugging Face layout") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold an object")
    return data
