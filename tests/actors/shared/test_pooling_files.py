"""What a checkpoint was made for, by its files: read as sentence-transformers writes them, or refused by name."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from quipu.actors.config.pooling_config import PoolingType, Task
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.actors.shared.pooling_files import VectorFiles, read_vector_files
from quipu.kernels.models.families import find_family
from quipu.web.cli.serve_flags import add_serve_flags
from quipu.web.cli.settings import resolve_config

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules.pooling."
MODES = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "word_embedding_dimension": 8}


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(content))


def read(folder: Path, wanted: str = "auto", *, kinds: Any = None, **files: Any) -> VectorFiles:
    """Write a checkpoint's files, by name without `.json`, and read them. `kinds`: modules after the transformer."""
    write(folder, "config.json", {"hidden_size": 8, "vocab_size": 50, **files.pop("config", {})})
    if kinds is not None:
        listed = [{"type": f"{OLD}Transformer", "path": ""}, *({"type": kind, "path": path} for kind, path in kinds)]
        write(folder, "modules.json", listed)
    for name, content in files.items():
        write(folder, name.replace("__", "/") + ".json", content)
    return read_vector_files(folder, wanted)


POOLED = ((f"{OLD}Pooling", "1_Pooling"), (f"{OLD}Normalize", "2_Normalize"))
LOGITS = (("sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "1_LogitScore"),)


def test_plain_checkpoint(tmp_path: Path) -> None:
    """A checkpoint that names nothing generates; asked to embed, it does so by its last token, normalised."""
    assert read(tmp_path).task is Task.GENERATE
    files = read(tmp_path, "embed")
    assert (files.task, files.pooling.type, files.pooling.normalizes) == (Task.EMBED, PoolingType.LAST, True)
    assert (files.num_dimensions, files.dimensions) == (8, ())


@pytest.mark.parametrize(
    ("config", "pooling"),
    [(MODES, PoolingType.LAST), ({"pooling_mode": "lasttoken"}, PoolingType.LAST), ({}, PoolingType.MEAN)],
)
def test_pooling(tmp_path: Path, config: dict[str, Any], pooling: PoolingType) -> None:
    """Older and newer configurations say which positions count; the module Normalize, whether vectors are scaled."""
    files = read(tmp_path, kinds=POOLED, **{"1_Pooling__config": config})
    assert (files.task, files.pooling.type, files.pooling.normalizes) == (Task.EMBED, pooling, True)
    plain = read(tmp_path, kinds=((f"{NEW}Pooling", "1_Pooling"),), **{"1_Pooling__config": config})
    assert not plain.pooling.normalizes


def test_rerankers(tmp_path: Path) -> None:
    """A LogitScore, or a converted checkpoint's tokens, make a reranker."""
    logits = {"1_LogitScore__config": {"true_token_id": 9, "false_token_id": 3}}
    files = read(tmp_path, kinds=LOGITS, **logits)
    assert (files.task, files.pooling.score_token_ids) == (Task.SCORE, (3, 9))
    assert not files.has_pair_template
    told = {"sentence_bert_config": {"modality_config": {"message": {"format": "flat"}}}}
    told["config_sentence_transformers"] = {"default_prompt_name": "a", "prompts": {"a": "Search."}}
    files = read(tmp_path, kinds=LOGITS, **logits, **told)
    assert files.has_pair_template and files.default_prompt == "Search."
    (tmp_path / "modules.json").unlink()
    (tmp_path / "sentence_bert_config.json").unlink()
    vocabulary = {"model": {"vocab": {"no": 5, "yes": 6, "nein": 7, "ja": 8}}}
    for config, wanted, ids in (
        ({"classifier_from_token": ["nein", "ja"]}, "auto", (7, 8)),
        ({}, "score", (5, 6)),
    ):
        files = read(tmp_path, wanted, config=config, tokenizer=vocabulary)
        assert (files.task, files.pooling.score_token_ids) == (Task.SCORE, ids)


QWEN, LLAMA = ({"architectures": [f"{family}ForSequenceClassification"]} for family in ("Qwen3", "Llama"))
ONE_LABEL = {"id2label": {"0": "LABEL_0"}}
SIGMOID = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}


def test_classifiers(tmp_path: Path) -> None:
    """A classifier with one label makes scores: Qwen3's in its own words, others' by a template for pairs."""
    for config, template in (
        (QWEN | ONE_LABEL | {"sentence_transformers": SIGMOID}, {}),
        (QWEN | {"num_labels": 1}, {}),
        (LLAMA | ONE_LABEL, {"sentence_bert_config": {"modality_config": {"message": {"format": "flat"}}}}),
    ):
        files = read(tmp_path, config=config, **template)
        assert (files.task, files.pooling.is_classifier, files.has_pair_template) == (Task.SCORE, True, bool(template))
    (tmp_path / "sentence_bert_config.json").unlink()
    assert not read(tmp_path, "embed", config=LLAMA).pooling.is_classifier


@pytest.mark.parametrize("architectures", [True, 7, "Qwen3ForSequenceClassification", {"a": 1}, [[1]], [None], None])
def test_architectures_that_are_no_names(tmp_path: Path, architectures: Any) -> None:
    """They make a checkpoint no classifier, and no family has it."""
    config = {"architectures": architectures, "hidden_size": "8"}
    assert read(tmp_path, config=config).task is Task.GENERATE
    assert read(tmp_path, "embed", config=config).num_dimensions == 0
    for headless in (False, True):
        with pytest.raises(ValueError, match="unsupported architecture"):
            find_family(config, headless=headless)


def test_dimensions_and_prompt(tmp_path: Path) -> None:
    """Vectors may be cut if config.json says so; a default prompt is put before texts."""
    assert read(tmp_path, "embed", config={"is_matryoshka": True}).dimensions is None
    told = {"default_prompt_name": "query", "prompts": {"query": "Query: "}}
    files = read(tmp_path, "embed", config={"matryoshka_dimensions": [2, 4]}, config_sentence_transformers=told)
    assert (files.dimensions, files.default_prompt) == ((2, 4), "Query: ")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"kinds": (*POOLED, (f"{OLD}Dense", "3_Dense"))}, "Dense is not supported"),
        ({"kinds": (*POOLED, *POOLED)}, "Pooling is not supported"),
        ({"kinds": ((f"{OLD}Pooling", "../x"),)}, "not a list of modules"),
        ({"modules": {"a": 1}}, "not a list of modules"),
        ({"kinds": ()}, "no module Pooling"),
        ({"kinds": POOLED, "1_Pooling__config": {"pooling_mode": "cls"}}, "pooling cls is not supported"),
        ({"kinds": POOLED, "1_Pooling__config": {**MODES, "pooling_mode_max_tokens": True}}, "is not supported"),
        ({"kinds": POOLED}, "1_Pooling/config.json does not exist"),
        ({"kinds": LOGITS, "1_LogitScore__config": {"true_token_id": 9}}, "must be token ids"),
        ({"kinds": LOGITS, "1_LogitScore__config": {"true_token_id": 99, "false_token_id": 1}}, "beyond the model's"),
        ({"wanted": "embed", "kinds": LOGITS}, "use --task score"),
        ({"wanted": "score", "tokenizer": {"model": {"vocab": {"yes": 1}}}}, "does not have both tokens"),
        ({"wanted": "embed", "config": {"matryoshka_dimensions": [0]}}, "list of positive integers"),
        (
            {"wanted": "embed", "config_sentence_transformers": {"default_prompt_name": "x"}},
            "is not one of its prompts",
        ),
        ({"wanted": "embed", "sentence_bert_config": {"modality_config": {"message": {}}}}, "chat template"),
        (
            {"wanted": "score", "sentence_bert_config": {"modality_config": {"message": {"format": "structured"}}}},
            "only messages of the format",
        ),
        ({"wanted": "embed", "sentence_bert_config": {"do_lower_case": True}}, "do_lower_case"),
        ({"config": QWEN}, "a classifier with 2 labels is not supported"),
        ({"config": QWEN | {"id2label": {"0": "a", "1": "b", "2": "c"}}}, "a classifier with 3 labels"),
        ({"config": QWEN | ONE_LABEL | {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}}, "torch.nn.Tanh"),
        ({"config": QWEN | ONE_LABEL | {"sbert_ce_default_activation_function": "x.Y"}}, "activation_fn x.Y"),
        ({"config": LLAMA | ONE_LABEL}, "needs a chat template for pairs"),
    ],
)
def test_refused(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    """What would change the vectors, and is not computed, is refused by name."""
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, **files)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--executor", "vllm"), "the vllm executor makes no embeddings"),
        (("--speculative", "ngram"), "--speculative must be off"),
    ],
)
def test_refused_at_start(flags: tuple[str, ...], words: str) -> None:
    """A server that embeds does not start with what only text needs, or on vLLM."""
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    with pytest.raises(CheckpointError, match=words):
        resolve_config(parser.parse_args(["demo", "--task", "embed", *flags]))
