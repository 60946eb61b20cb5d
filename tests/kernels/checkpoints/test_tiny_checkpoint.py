"""The demo checkpoint that comes with the package: small, reproducible, an ordinary Hugging Face folder."""

from __future__ import annotations

import json
import runpy
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from quipu.kernels.reference.reference_backend import ReferenceBackend
from tests.kernels.kernel_checkpoints import DEMO, backend_config, make_batch

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "make_demo_model.py"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_size() -> None:
    """Stay below 6 MB, because it is in the repository and in every wheel."""
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < 6_000_000
    assert {path.suffix for path in DEMO.iterdir()} <= {".json", ".safetensors", ".jinja", ".txt"}


def test_weights_are_reproducible() -> None:
    """Generate exactly the committed tensors."""
    from safetensors.torch import load_file

    made = runpy.run_path(str(SCRIPT))["make_weights"]()
    committed = load_file(DEMO / "model.safetensors")
    assert made.keys() == committed.keys()
    assert all(torch.equal(made[name], committed[name]) for name in made)


def test_tokenizer_shape(tokenizer: Tokenizer) -> None:
    """Have 4,096 entries, the special tokens first, and short encodings of common words."""
    assert tokenizer.get_vocab_size() == json.loads((DEMO / "config.json").read_text())["vocab_size"] == 4096
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert [tokenizer.token_to_id(token) for token in specials] == [0, 1, 2]
    assert len(tokenizer.encode(string.ascii_lowercase + " the class method").ids) < 26


@settings(max_examples=150)
@given(text=st.text(max_size=60))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    """Decode any encoded Unicode text without special tokens to itself."""
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    """Encode characters from all over Unicode: no UTF-8 byte lacks a token."""
    text = "".join(map(chr, range(0x20, 0x800))) + "\U0001f98a 漢字 \x00\x7f"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_transformers_loads_it_and_agrees(tokenizer: Tokenizer) -> None:
    """AutoTokenizer and AutoModelForCausalLM load the folder as it is, with the same ids and nearly the same logits."""
    theirs = AutoTokenizer.from_pretrained(DEMO)
    text = "def f(x):\n    return x  # 漢字"
    ids = tokenizer.encode(text).ids
    assert theirs(text)["input_ids"] == ids
    assert (theirs.eos_token, theirs.pad_token) == ("<|im_end|>", "<|endoftext|>")
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    backend = ReferenceBackend(backend_config(DEMO, dtype="float32"))
    batch = make_batch({"token_ids": ids, "position": 0, "blocks": [3, 9]})
    torch.testing.assert_close(backend.logits(batch, list(range(len(ids)))), expected, rtol=0, atol=1e-3)


def test_chat_template() -> None:
    """Render ChatML, with and without the generation prompt; the markers are encoded as special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text.removesuffix("<|im_start|>assistant\n")
    ids = tokenizer(text)["input_ids"]
    assert (ids.count(1), ids.count(2)) == (5, 4)


def test_sampling_is_not_degenerate(tokenizer: Tokenizer) -> None:
    """Tied random weights tend to repeat the last token; here entropy is high, and greedy text does not repeat."""
    backend = ReferenceBackend(backend_config(DEMO))
    ids = tokenizer.encode("Once upon a time there was a module").ids
    blocks = list(range(1, 9))
    logits = backend.logits(make_batch({"token_ids": ids, "position": 0, "blocks": blocks}), list(range(len(ids))))
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert entropy.min() > 2 and entropy.max() < np.log(4096) - 0.5
    output = backend.step(make_batch({"token_ids": ids, "position": 0, "blocks": blocks})).token_ids
    for position in range(len(ids), len(ids) + 40):
        row = {"token_ids": [0], "carried": True, "position": position, "blocks": blocks}
        output += backend.step(make_batch(row)).token_ids
    assert len(set(output)) > 25
