"""The checkpoint of the tests: small, reproducible, and with output that is not degenerate."""

from __future__ import annotations

import runpy
import string

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from quipu.kernels.reference.reference_backend import ReferenceBackend
from tests.kernels.kernel_checkpoints import backend_config
from tests.kernels.step_batches import make_batch
from tests.tiny import TINY

SCRIPT = TINY.parent / "make_tiny.py"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def test_size() -> None:
    """Stay below 6 MB, because it is in the repository."""
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 6_000_000
    assert {path.suffix for path in TINY.iterdir()} <= {".json", ".safetensors", ".jinja", ".txt"}


def test_weights_are_reproducible() -> None:
    """Generate exactly the committed tensors."""
    from safetensors.torch import load_file

    made = runpy.run_path(str(SCRIPT))["make_weights"]()
    committed = load_file(TINY / "model.safetensors")
    assert made.keys() == committed.keys()
    assert all(torch.equal(made[name], committed[name]) for name in made)


def test_tokenizer_shape(tokenizer: Tokenizer) -> None:
    """Have 4,096 entries, and short encodings of common words."""
    assert tokenizer.get_vocab_size() == 4096
    assert len(tokenizer.encode(string.ascii_lowercase + " the class method").ids) < 26


def test_chat_template() -> None:
    """Render ChatML, with and without the generation prompt; the markers are encoded as special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
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
    backend = ReferenceBackend(backend_config(TINY))
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
