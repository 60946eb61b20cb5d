"""Reads what the web process needs to know about a checkpoint from its JSON files, without torch.

Used by `web/cli/` to resolve the server's sizes, and by what loads the checkpoint's other files. What must always hold:
nothing here opens a weight file.
"""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from quipu.kernels.models.entry_types import MOST, is_deep, is_whole, shown
from quipu.kernels.models.text_part import find_decoder

from .hub import HubError, fetch

DEMO = Path(__file__).resolve().parents[2] / "kernels" / "demo" / "checkpoint"
DEMO_ADAPTER_NAME, DEMO_ADAPTER = "demo-pirate", DEMO.parent / "pirate"
"""The adapter of the demo model that is part of the package."""

_DTYPES = ("bfloat16", "float16", "float32")
_ID = re.compile("[0-9]{1,10}")
"""An id as a key of JSON. Python refuses to read the longest numbers."""
_OLDER_LENGTH = "n_positions"
"""What GPT-2 and its like, which other executors than ours serve, have in place of `max_position_embeddings`."""
_MAX_LISTED = 1000
"""How many files of a folder are searched for a model whose name was misspelled."""


class CheckpointError(ValueError):
    """The model cannot be served. The message says why. Nothing was loaded."""


@attrs.frozen
class CheckpointInfo:
    path: Path
    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str


def resolve(model: str, *, only_local: bool = False) -> Path:
    """Return the folder of `model`: `demo`, a folder, or what the Hugging Face hub has (`hub.py`).

    For GGUF files it is a temporary folder, which is removed when this process ends. Nothing is downloaded if
    `only_local`. Raises CheckpointError.
    """
    if model == "demo":
        return DEMO
    path = Path(model)
    if path.is_dir() or (path.suffix.lower() == ".gguf" and path.is_file()):
        return _with_json(path).resolve()
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(
            f"model {model!r} is neither a folder nor a hub id of the form owner/name (owner/name:TYPE for GGUF), "
            f"nor a GGUF file{_similar(path)}"
        )
    try:
        return _with_json(fetch(model, only_local=only_local))
    except HubError as error:
        raise CheckpointError(
            f"model {model!r} is not a folder and could not be fetched from the hub: {error}"
        ) from error


def _similar(path: Path) -> str:
    """Return a hint for an error message that names an existing file similar to `path`."""
    try:
        there = [each.name for each in islice(path.expanduser().parent.iterdir(), _MAX_LISTED)]
    except OSError:
        there = []
    names = {name.lower(): str(path.parent / name) for name in there if not name.startswith(".")}
    if path.parent == Path():
        names["demo"] = "demo"
    near = get_close_matches(path.name.lower(), names, n=1)
    return f"; did you mean {names[near[0]]}?" if near else "; `demo` is part of the package"


def _with_json(path: Path) -> Path:
    """Return a folder with JSON files: the folder itself, or one made of the keys of a GGUF file."""
    if path.is_dir() and (path / "config.json").exists() and not any(path.glob("*.gguf")):
        return path
    from quipu.kernels.checkpoints.gguf_folder import find_gguf, make_gguf_folder

    try:
        file = find_gguf(path) if path.is_dir() else path
        return path if file is None else make_gguf_folder(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from None


def read_info(
    path: Path, *, name: str | None = None, dtype: str = "auto", quantization: str | None = None
) -> CheckpointInfo:
    """Read the checkpoint in `path`, which is to be quantized as told. Raises CheckpointError.

    A turn ends with any token that config.json (`text_config` included), generation_config.json,
    tokenizer_config.json or special_tokens_map.json names as its end, and that the model can draw.
    """
    config = read_json(path / "config.json")
    if "vocab_size" not in config and isinstance(config.get("text_config"), dict):
        decoder = find_decoder(config)  # of a model that reads more than text
        config = {**({} if decoder is None else decoder.defaults), **config["text_config"], **config}
    max_model_len = _context_length(config)
    vocab_size = _positive(config, "vocab_size")
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype == "float16" and (quantization or config.get("quantization_config")):
            dtype = "bfloat16"  # as the weights are opened (kernels/checkpoints/weights.py)
    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype {shown(dtype)} is not supported; choose one of {', '.join(_DTYPES)}")
    generation = path / "generation_config.json"
    eos = _as_ids("config.json: eos_token_id", config.get("eos_token_id"))
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        eos += _as_ids("config.json: text_config.eos_token_id", text_config.get("eos_token_id"))
    if generation.exists():
        eos += _as_ids(f"{generation.name}: eos_token_id", read_json(generation).get("eos_token_id"))
    eos += _end_token_ids(path)
    return CheckpointInfo(
        path=path,
        name=name or path.name,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in eos if 0 <= token_id < vocab_size)),
        dtype=dtype,
    )


def _positive(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not is_whole(value) or value <= 0:
        raise CheckpointError(f"config.json: {key} must be a positive integer, not {shown(value)}")
    return int(value)


def _context_length(config: dict[str, Any]) -> int:
    """Return the context length in tokens.

    YaRN extends the trained length, but configs often keep the latter as `max_position_embeddings`.
    """
    is_older = _OLDER_LENGTH in config and "max_position_embeddings" not in config
    longest = _positive(config, _OLDER_LENGTH if is_older else "max_position_embeddings")
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(name) or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"config.json: {name} must be an object, not {shown(rope)}")
    if (rope.get("rope_type") or rope.get("type")) == "yarn" and "original_max_position_embeddings" in rope:
        factor, original = rope.get("factor"), rope["original_max_position_embeddings"]
        for key, value in (("factor", factor), ("original_max_position_embeddings", original)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
                raise CheckpointError(
                    f"config.json: {name}.{key} must be a positive number up to {MOST}, not {shown(value)}"
                )
        longest = max(longest, int(factor * original))
        if longest > MOST:
            raise CheckpointError(
                f"config.json: {name} gives a context of {longest} tokens; at most {MOST} are supported"
            )
    return longest


def _as_ids(place: str, value: object) -> list[int]:
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    ids = [one for one in values if is_whole(one)]
    if len(ids) < len(values):
        raise CheckpointError(f"{place} must be a token id or a list of them, not {shown(value)}")
    return ids


def _end_token_ids(folder: Path) -> list[int]:
    """Return the ids of the `eos_token` of tokenizer_config.json and of the older special_tokens_map.json.

    Chat models that were made from base models often name it only here: their config.json and generation_config.json
    keep the base model's end, and an answer that is not stopped at this one runs on, and is billed. A name that is not
    in the vocabulary ends no turn.
    """
    files = [folder / "tokenizer_config.json", folder / "special_tokens_map.json"]
    config, special = (read_json(path) if path.exists() else {} for path in files)
    names = dict.fromkeys(name for name in (_end_token(config), _end_token(special)) if name is not None)
    return [token_id for name in names for token_id in _find_token(name, config, folder / "tokenizer.json")]


def _end_token(file: dict[str, Any]) -> str | None:
    value = file.get("eos_token")
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None


def token_ids_of(folder: Path, name: str) -> list[int]:
    """Return the id of a token of the checkpoint's vocabulary; none if it has no such token. Raises CheckpointError."""
    path = folder / "tokenizer_config.json"
    return _find_token(name, read_json(path) if path.exists() else {}, folder / "tokenizer.json")


def _find_token(name: str, config: dict[str, Any], tokenizer: Path) -> list[int]:
    added = config.get("added_tokens_decoder")
    if isinstance(added, dict):
        for key, token in added.items():
            if isinstance(token, dict) and token.get("content") == name and _ID.fullmatch(key):
                return [int(key)]
    return _in_vocabulary(tokenizer, name)


def _in_vocabulary(path: Path, name: str) -> list[int]:
    if not path.exists():
        return []
    tokenizer = read_json(path)
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == name:
            return _one_id(token.get("id"))
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        return _one_id(vocabulary.get(name))
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score
        return [number for number, pair in enumerate(vocabulary) if isinstance(pair, list) and pair[:1] == [name]][:1]
    return []


def _one_id(value: object) -> list[int]:
    return [value] if type(value) is int and value >= 0 else []


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object. Raises CheckpointError."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: this is not a checkpoint in the Hugging Face layout") from error
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not contain a JSON object")
    if is_deep(data):
        raise CheckpointError(f"{path} is nested too deeply")
    return data
