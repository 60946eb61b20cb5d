"""What a checkpoint was made for, and how vectors and scores are made of its outputs, as its files say.

Embedding models and rerankers of sentence-transformers list their modules in modules.json, each with a config.json in a
folder of its own (https://sbert.net/docs/package_reference/sentence_transformer/modules.html). Used by `web/cli/`.

What must always hold: a module or an option that would change the vectors is computed or refused by name, never
ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ..config.pooling_config import LAST_TOKEN, PoolingConfig, PoolingType, Task
from .checkpoint import CheckpointError, read_json, token_ids_of

_MODULES = "modules.json"
_MAX_BYTES = 1 << 20
_MAX_DIMENSIONS = 1024
"""Lengths of vectors that a configuration may list."""
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_TYPES = {"lasttoken": PoolingType.LAST, "mean": PoolingType.MEAN}
_ANSWERS = ("no", "yes")
"""The tokens of Qwen3-Reranker."""
_CLASSIFIER = "ForSequenceClassification"
"""The end of the name of an architecture with a `score.weight` in place of an output head."""
_IN_WORDS_OF_QWEN = f"Qwen3{_CLASSIFIER}"
"""The only one of them that is asked about pairs in the words of Qwen3-Reranker: what vLLM makes of it."""
_SIGMOID = "torch.nn.modules.activation.Sigmoid"


@attrs.frozen(kw_only=True)
class VectorFiles:
    """What the files say."""

    task: Task
    pooling: PoolingConfig = LAST_TOKEN
    num_dimensions: int = 0
    """Elements of a vector."""
    dimensions: tuple[int, ...] | None = ()
    """Lengths to which vectors may be cut. None: any."""
    default_prompt: str = ""
    """Text that is put before every other; by a reranker with a template, as a system message."""
    has_pair_template: bool = False
    """Whether a reranker's chat template has the words by which it is asked about a query and a document."""


def read_vector_files(folder: Path, wanted: str) -> VectorFiles:
    """Read the files of a checkpoint, for the task that is `wanted` (`auto`: the one that it was made for).

    Raises CheckpointError for what is not supported, and for a task that it cannot do.
    """
    modules = _read_modules(folder / _MODULES) if wanted != Task.GENERATE else {}
    config = read_json(folder / "config.json")
    task = _made_for(modules, config) if wanted == "auto" else Task(wanted)
    if task is Task.SCORE:
        has_template = _has_pair_template(folder / "sentence_bert_config.json")
        is_classifier = _is_classifier(modules, config)
        if is_classifier:
            _check_classifier(config, has_template=has_template)
        return VectorFiles(
            task=task,
            pooling=PoolingConfig(is_classifier=True) if is_classifier else _read_scoring(folder, modules, config),
            default_prompt=_default_prompt(folder / "config_sentence_transformers.json") if has_template else "",
            has_pair_template=has_template,
        )
    if task is Task.GENERATE:
        return VectorFiles(task=task)
    if "LogitScore" in modules:
        raise CheckpointError(f"--task embed: {_MODULES} is that of a reranker: use --task score")
    _check_inputs(folder / "sentence_bert_config.json")
    prompt = _default_prompt(folder / "config_sentence_transformers.json")
    return VectorFiles(
        task=task,
        pooling=_read_pooling(folder, modules, has_prompt=bool(prompt)) if modules else LAST_TOKEN,
        num_dimensions=size if isinstance(size := config.get("hidden_size"), int) else 0,
        dimensions=_matryoshka(config),
        default_prompt=prompt,
    )


def _made_for(modules: Mapping[str, str], config: Mapping[str, Any]) -> Task:
    if "LogitScore" in modules or config.get("classifier_from_token") or _is_classifier(modules, config):
        return Task.SCORE
    return Task.EMBED if modules else Task.GENERATE


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []  # who loads the model refuses another value


def _is_classifier(modules: Mapping[str, str], config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has a `score.weight`, as transformers' classifiers have."""
    by_tokens = (config.get("is_original_qwen3_reranker"), config.get("classifier_from_token"), "LogitScore" in modules)
    return not any(by_tokens) and any(name.endswith(_CLASSIFIER) for name in _architectures(config))


def _check_classifier(config: Mapping[str, Any], *, has_template: bool) -> None:
    """Raises CheckpointError for a classifier that makes no scores of pairs, or other ones."""
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if num_labels != 1:
        raise CheckpointError(
            f"config.json: a classifier with {num_labels} labels is not supported, only one with a single label, which "
            "is a score"
        )
    told = config.get("sentence_transformers")
    activation = told.get("activation_fn") if isinstance(told, dict) else None
    activation = activation or config.get("sbert_ce_default_activation_function") or _SIGMOID
    if activation != _SIGMOID:
        raise CheckpointError(f"config.json: activation_fn {str(activation)[:80]} is not supported, only {_SIGMOID}")
    if not has_template and _IN_WORDS_OF_QWEN not in _architectures(config):
        raise CheckpointError(
            f"sentence_bert_config.json: a classifier other than {_IN_WORDS_OF_QWEN} needs a chat template for pairs "
            "(`message` in `modality_config`), which says how it is asked"
        )


def _read_modules(path: Path) -> dict[str, str]:
    """Return the folder of each module by its type, without that of its package. Empty: there is no such file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_BYTES} bytes")
        listed = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    modules: dict[str, str] = {}
    for module in listed if isinstance(listed, list) else [None]:
        kind, folder = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str) or ".." in Path(folder).parts:
            raise CheckpointError(f"{path} is not a list of modules with `type` and `path`")
        name = kind.rpartition(".")[2]
        if name in modules or name not in ("Transformer", "Pooling", "Normalize", "LogitScore"):
            raise CheckpointError(f"{path}: module {kind[:80]} is not supported")
        modules[name] = folder
    return modules


def _read_pooling(folder: Path, modules: Mapping[str, str], *, has_prompt: bool) -> PoolingConfig:
    if "Pooling" not in modules:
        raise CheckpointError(f"{folder / _MODULES} has no module Pooling, so that it makes no embeddings")
    path = folder / modules["Pooling"] / "config.json"
    config = read_json(path)
    mode = config.get("pooling_mode")
    if mode is None:
        named = [mode for key, mode in _LEGACY_MODES.items() if config.get(key)]
        mode = named[0] if len(named) == 1 else named or "mean"
    if isinstance(mode, list) and len(mode) == 1:
        mode = mode[0]
    if not isinstance(mode, str) or mode not in _TYPES:
        raise CheckpointError(f"{path}: pooling {str(mode)[:80]} is not supported, only {' and '.join(_TYPES)}")
    pooling = PoolingConfig(type=_TYPES[mode], normalizes="Normalize" in modules)
    if has_prompt and pooling.type is PoolingType.MEAN and config.get("include_prompt") is False:
        raise CheckpointError(f"{path}: include_prompt false is not supported for a checkpoint with a default prompt")
    return pooling


def _read_scoring(folder: Path, modules: Mapping[str, str], config: Mapping[str, Any]) -> PoolingConfig:
    if "LogitScore" in modules:
        path = folder / modules["LogitScore"] / "config.json"
        logits = read_json(path)
        named = [logits.get("false_token_id"), logits.get("true_token_id")]
        ids = [one for one in named if type(one) is int and one >= 0]
        if len(ids) != len(named):
            raise CheckpointError(f"{path}: false_token_id and true_token_id must be token ids")
    else:
        names = config.get("classifier_from_token") or _ANSWERS
        if not isinstance(names, list | tuple) or len(names) != 2 or not all(type(name) is str for name in names):
            raise CheckpointError("config.json: classifier_from_token must be a list of two tokens")
        ids = [token_id for name in names for token_id in token_ids_of(folder, name)[:1]]
        if len(ids) != 2:
            raise CheckpointError(f"--task score: the vocabulary does not have both tokens, {' and '.join(names)}")
    most = config.get("vocab_size")
    if isinstance(most, int) and max(ids) >= most:
        raise CheckpointError(f"--task score: token id {max(ids)} is beyond the model's vocabulary")
    return PoolingConfig(score_token_ids=tuple(ids))


def _matryoshka(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    listed = config.get("matryoshka_dimensions")
    if listed is None:
        return None if config.get("is_matryoshka") else ()
    if (
        not isinstance(listed, list)
        or len(listed) > _MAX_DIMENSIONS
        or not all(type(n) is int and n > 0 for n in listed)
    ):
        raise CheckpointError("config.json: matryoshka_dimensions must be a list of positive integers")
    return tuple(listed)


def _has_pair_template(path: Path) -> bool:
    """Return whether sentence-transformers would put a pair into the chat template, as messages of two roles.

    Raises CheckpointError if it would do so in another way than as messages with a text each.
    """
    config = read_json(path) if path.exists() else {}
    modalities = config.get("modality_config")
    message = modalities.get("message") if isinstance(modalities, dict) else None
    if message is None:
        return False
    if not isinstance(message, dict) or message.get("format") != "flat":
        raise CheckpointError(f"{path}: only messages of the format `flat` are supported for a reranker's template")
    if config.get("processing_kwargs"):
        raise CheckpointError(f"{path}: processing_kwargs are not supported for a reranker's template")
    return True


def _check_inputs(path: Path) -> None:
    """Raises CheckpointError if sentence-transformers would change a text before it is tokenized."""
    config = read_json(path) if path.exists() else {}
    modalities = config.get("modality_config")
    if isinstance(modalities, dict) and "message" in modalities:
        raise CheckpointError(
            f"{path}: modality_config has `message`, so that texts would be put into a chat template: not supported"
        )
    if config.get("do_lower_case"):
        raise CheckpointError(f"{path}: do_lower_case is not supported")


def _default_prompt(path: Path) -> str:
    """Return the text that sentence-transformers would put before every other."""
    if not path.exists():
        return ""
    config = read_json(path)
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise CheckpointError(f"{path}: default_prompt_name is not one of its prompts")
    return prompt
