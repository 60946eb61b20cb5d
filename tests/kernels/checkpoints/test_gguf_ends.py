"""Which tokens of a GGUF file end a generation: what its keys name, and what llama.cpp knows by its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from quipu.kernels.checkpoints.gguf_config import make_generation_config
from quipu.kernels.checkpoints.gguf_file import GgufFile
from quipu.kernels.checkpoints.gguf_tokenizer import make_tokenizer

KNOWN = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
    *("< EOT >", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<|return|>", "<|call|>", "<|calls|>"),
    *("<|flush|>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),  # noqa: RUF001
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
    *("<REPO>", "<reponame>", "<|file_sep|>"),
)
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def file_with(tokens: list[str], types: list[int] | None = None, **more: Any) -> GgufFile:
    keys = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": types or [NORMAL] * len(tokens), **more}
    keys.setdefault("merges", ["a b"])
    return GgufFile(Path("m.gguf"), {f"tokenizer.ggml.{name}": value for name, value in keys.items()}, {})


def ends(*tokens: str, **more: Any) -> list[str]:
    every = ["a", "b", "ab", *tokens]
    return [every[number] for number in make_generation_config(file_with(every, **more))["eos_token_id"]]


@pytest.mark.parametrize("token", KNOWN)
@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_known_by_its_text(token: str, kind: int) -> None:
    """A known end token ends a generation and is one special token in a text, whatever type the file gives it."""
    file = file_with(["a", "b", "ab", token], [NORMAL, NORMAL, NORMAL, kind])
    assert make_generation_config(file)["eos_token_id"] == [3]
    tokenizer = Tokenizer.from_str(json.dumps(make_tokenizer(file)))
    assert tokenizer.encode(f"ab{token}a").ids == [2, 3, 0]
    assert tokenizer.decode([2, 3, 0], skip_special_tokens=True) == "aba"


def test_ends_of_parts_of_a_turn() -> None:
    """Tokens that end only part of a turn end nothing in vocabularies that llama.cpp knows, even if a key names one."""
    assert ends("<|end|>", "<|return|>") == ["<|end|>", "<|return|>"]
    assert ends("<|end|>", "<|return|>", "<|call|>") == ["<|return|>", "<|call|>"]
    assert ends("<|end|>", "<|return|>", "<|calls|>", eos_token_id=3) == ["<|return|>", "<|calls|>"]
    assert ends("<|end|>", "<|flush|>", "<|calls|>") == ["<|flush|>", "<|calls|>"]
    assert ends("</s>", "<|tool_response>") == ["<|tool_response>"]


def test_keys() -> None:
    """Keys name ends first; one that names no token of the vocabulary is passed over, as in llama.cpp."""
    assert ends("x", "<|im_end|>", eos_token_id=3, eot_token_id=1, eom_token_id=2) == ["x", "b", "ab", "<|im_end|>"]
    assert ends("x", eos_token_id=4, eot_token_id=-1, eom_token_id="3") == []
    assert ends("<|fim_pad|>", "<PAD>", fim_rep_token_id=0, fim_sep_token_id=1) == ["a", "b", "<|fim_pad|>"]
    assert ends("<|fim_pad|>", fim_pad_token_id=0) == ["a"]


def test_end_of_sentence_pieces() -> None:
    """Without a key, the end token of a SentencePiece vocabulary is number 2, as in llama.cpp."""
    assert ends(model="llama", scores=[0.0] * 3) == ["ab"]
    assert ends(model="llama", scores=[0.0] * 3, eos_token_id=1) == ["b"]
