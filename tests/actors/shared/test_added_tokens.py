"""The files beside tokenizer.json: random combinations of their entries, compared with transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from quipu.actors.messages.outcomes import ErrorKind
from quipu.actors.messages.prompts import ChatPrompt, TextPrompt
from quipu.actors.shared.added_tokens import read_special_tokens
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.actors.shared.tokenizers_library import Library, load_library
from tests.runtimes import small_runtime
from tests.tiny import TINY

TOKENIZER = json.loads((TINY / "tokenizer.json").read_text())
OWN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
"""Added tokens of the tokenizer."""
TEXTS = st.sampled_from([*OWN, "the", "e", "<tool>", "<new>", " <s>"])
"""Also texts that are only in its vocabulary, and texts that are in neither."""
FLAG_NAMES = ["lstrip", "rstrip", "single_word", "normalized"]
FLAGS = st.dictionaries(st.sampled_from(FLAG_NAMES), st.booleans())


@st.composite
def flagged(draw: st.DrawFn, **more: Any) -> dict[str, Any]:
    return {"content": draw(TEXTS), **draw(FLAGS), **more}


NAMES = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token"]
MARKED = flagged(__type=st.just("AddedToken")).map(lambda token: {**token, "__type": "AddedToken"})
NAMED = st.dictionaries(st.sampled_from(NAMES), st.none() | TEXTS | MARKED, max_size=4)
EXTRA = st.none() | st.lists(TEXTS | MARKED, max_size=3) | st.dictionaries(st.sampled_from(["x", "y"]), TEXTS)
WITHOUT_EFFECT = st.fixed_dictionaries(
    {},
    optional={
        "add_bos_token": st.booleans(),
        "add_eos_token": st.booleans(),
        "add_prefix_space": st.booleans(),
        "legacy": st.booleans(),
        "use_default_system_prompt": st.booleans(),
        "clean_up_tokenization_spaces": st.booleans(),
        "split_special_tokens": st.just(value=False),
        "model_max_length": st.integers(100, 900),
    },
)
ADDED = st.lists(st.builds(lambda token, special: {**token, "special": special}, flagged(), st.booleans()), max_size=4)


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """Generate the files of a checkpoint."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **draw(NAMED), **draw(WITHOUT_EFFECT)}
    if draw(st.booleans()):
        config[draw(st.sampled_from(["extra_special_tokens", "additional_special_tokens"]))] = draw(EXTRA)
    found: dict[str, Any] = {"tokenizer_config": config}
    if draw(st.booleans()):
        ids = draw(st.lists(st.integers(0, 600), min_size=4, max_size=4, unique=True))
        config["added_tokens_decoder"] = dict(zip(map(str, ids), draw(ADDED), strict=False))
    if draw(st.booleans()):
        special: dict[str, Any] = {**draw(st.dictionaries(st.sampled_from(NAMES[:7]), TEXTS | flagged(), max_size=3))}
        if draw(st.booleans()):
            special["additional_special_tokens"] = draw(st.lists(TEXTS, max_size=2))
        elif draw(st.booleans()):
            special["extra_special_tokens"] = draw(st.lists(TEXTS | flagged(), max_size=2))
        found["special_tokens_map"] = special
    if draw(st.booleans()):
        found["added_tokens"] = draw(st.dictionaries(TEXTS, st.integers(0, 600), max_size=3))
    return found


def write(folder: Path, contents: dict[str, Any]) -> Path:
    for name in ("tokenizer_config", "special_tokens_map", "added_tokens"):
        (folder / f"{name}.json").unlink(missing_ok=True)
    for name, content in {"tokenizer": TOKENIZER, **contents}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.mark.timeout(900)  # for thousands of examples
@given(contents=files(), text=st.lists(TEXTS | st.sampled_from(["", " ", "\n", "x", "é "]), max_size=9).map("".join))
def test_same_as_transformers(folder: Path, contents: dict[str, Any], text: str) -> None:
    """Texts have the same ids, ids have the same text, and templates know the same tokens by the same names."""
    write(folder, contents)
    expected = AutoTokenizer.from_pretrained(folder)
    library = load_library(folder)
    ids = expected.encode(text)
    assert library.list_ids(text) == ids
    assert library.list_ids(text, add_special_tokens=False) == expected.encode(text, add_special_tokens=False)
    for skips in (False, True):
        assert library.decode(ids, skip_special_tokens=skips) == expected.decode(ids, skip_special_tokens=skips)
    assert read_special_tokens(folder).texts == expected.special_tokens_map
    assert Library.load(library.source).list_ids(text) == ids


@pytest.mark.parametrize(
    ("contents", "named"),
    [
        ({"split_special_tokens": True}, "split_special_tokens is not supported"),
        ({"fix_mistral_regex": True}, "fix_mistral_regex is not supported"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}, "fast_tokenizer_files is not supported"),
        ({"eos_token": 3}, "eos_token must be a string or an object with a `content`"),
        ({"eos_token": {"content": 3}}, "eos_token must be a string or an object with a `content`"),
        ({"eos_token": {"content": "x", "lstrip": "yes"}}, "eos_token has a flag that is neither true nor false"),
        ({"eos_token": "\ud800"}, "eos_token has a lone surrogate"),
        ({"added_tokens_decoder": {"7": {"content": "a\udfff"}}}, r"added_tokens_decoder\[7\] has a lone surrogate"),
        ({"added_tokens_decoder": None}, "added_tokens_decoder must be an object"),
        ({"added_tokens_decoder": [{"content": "x"}]}, "added_tokens_decoder must be an object"),
        ({"added_tokens_decoder": {"-1": {"content": "x"}}}, "added_tokens_decoder has a key that is no token id"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}, "has a key that is no token id"),
        ({"added_tokens_decoder": {"7": "x"}}, r"added_tokens_decoder\[7\] must be a string or an object"),
        ({"extra_special_tokens": 3}, "extra_special_tokens must be a list of tokens"),
        ({"extra_special_tokens": {"tools": "x"}}, "extra_special_tokens must not have the name tools"),
        ({"additional_special_tokens": [3]}, "additional_special_tokens must be a string or an object"),
    ],
)
def test_refused_by_name(folder: Path, contents: dict[str, Any], named: str) -> None:
    """An entry that would change ids and cannot be read is an error that names the file and the entry."""
    write(folder, {"tokenizer_config": contents})
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json.* {named}"):
        load_library(folder)


def test_older_files_refused_by_name(folder: Path) -> None:
    """The same holds for the older files, which are not read if there is an `added_tokens_decoder`."""
    write(folder, {"special_tokens_map": {"eos_token": {"content": 3}}})
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json: eos_token must be a string"):
        load_library(folder)
    write(folder, {"added_tokens": {"x": "7"}})
    with pytest.raises(CheckpointError, match=r"added_tokens\.json must have at most"):
        load_library(folder)
    write(folder, {"added_tokens": {"\ud800": 7}})
    with pytest.raises(CheckpointError, match=r"added_tokens\.json has a lone surrogate"):
        load_library(folder)
    write(folder, {"added_tokens": {"x": "7"}, "tokenizer_config": {"added_tokens_decoder": {}}})
    load_library(folder)


def test_nothing_to_add(folder: Path) -> None:
    """A tokenizer whose tokens are already as declared is used unchanged."""
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    write(folder, {"tokenizer_config": config})
    assert load_library(folder).source == (folder / "tokenizer.json").read_bytes()


async def test_token_that_the_model_does_not_have(tmp_path: Path) -> None:
    """A text with a token beyond the model's embedding gets a 400, and no step fails."""
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "image_token": "<image>"}))
    async with small_runtime(model_path=str(model)) as client:
        for prompt in (TextPrompt("a <image>"), ChatPrompt(({"role": "user", "content": "<image>"},))):
            answer = await client.ask(prompt)
            assert answer.error is not None and answer.error.kind is ErrorKind.INVALID
            assert (
                answer.error.param == "prompt" and "token 4096, which this model does not have" in answer.error.message
            )
        assert (await client.ask(TextPrompt("a <imag"))).error is None
        client.assert_at_rest()
