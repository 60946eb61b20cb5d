"""The model that is part of the package, and the tests' own: ordinary Hugging Face folders, as transformers reads them.

Nothing here depends on what the models say.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from quipu.actors.shared.checkpoint import DEMO
from quipu.kernels.reference.reference_backend import ReferenceBackend
from tests.kernels.kernel_checkpoints import backend_config
from tests.kernels.step_batches import make_batch
from tests.tiny import TINY

MAX_DEMO_BYTES = 12_000_000
"""It is in the repository and in every wheel."""


@pytest.fixture(scope="module", params=[DEMO, TINY], ids=["demo", "tiny"])
def folder(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_demo_size() -> None:
    """Consist of few megabytes, and of kinds of files that are packaged."""
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < MAX_DEMO_BYTES
    assert {path.suffix for path in DEMO.iterdir()} <= {".json", ".safetensors", ".jinja", ".txt"}


def test_every_id_has_a_token(folder: Path, tokenizer: Tokenizer) -> None:
    """Tokenizer and model have the same vocabulary, with ChatML's special tokens first."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert [tokenizer.token_to_id(token) for token in specials] == [0, 1, 2]


@settings(max_examples=150)
@given(text=st.text(max_size=60))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    """Decode any encoded Unicode text without special tokens to itself, apart from normalization."""
    normalized = unicodedata.normalize("NFC", text) if tokenizer.normalizer else text
    assert tokenizer.decode(tokenizer.encode(text).ids) == normalized


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    """Encode characters from all over Unicode: no UTF-8 byte lacks a token."""
    text = unicodedata.normalize("NFC", "".join(map(chr, range(0x20, 0x800))) + "\U0001f98a 漢字 \x00\x7f")
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_transformers_loads_it_and_agrees(folder: Path, tokenizer: Tokenizer) -> None:
    """AutoTokenizer and AutoModelForCausalLM load the folder as it is, with the same ids and nearly the same logits."""
    theirs = AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n    return x  # 漢字"
    ids = tokenizer.encode(text).ids
    assert theirs(text)["input_ids"] == ids
    assert (theirs.eos_token, theirs.pad_token) == ("<|im_end|>", "<|endoftext|>")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    backend = ReferenceBackend(backend_config(folder, dtype="float32"))
    batch = make_batch({"token_ids": ids, "position": 0, "blocks": [3, 9]})
    torch.testing.assert_close(backend.logits(batch, list(range(len(ids)))), expected, rtol=0, atol=1e-3)
