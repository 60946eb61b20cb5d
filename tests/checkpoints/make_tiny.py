"""Make the tests' checkpoint: a tiny Qwen3 with random weights and a real tokenizer, in the Hugging Face layout.

    python tests/checkpoints/make_tiny.py [folder]

Whole servers run on it in tests. The model is untrained and its output is meaningless. Its tokenizer is trained on text
that comes with Python: the language reference in `pydoc_data.topics` and the docstrings of some standard library
modules (copyright Python Software Foundation; the PSF licence permits this). Two runs with the same versions of Python,
numpy and tokenizers produce the same bytes; another Python version has different text.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SEED = 20_260_101
VOCAB_SIZE = 4096
MAX_POSITIONS = 16_384
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DOCSTRING_MODULES = [
    "argparse", "asyncio", "collections", "contextlib", "dataclasses", "datetime", "decimal", "difflib", "email",
    "enum", "fractions", "functools", "heapq", "inspect", "json", "logging", "pathlib", "random", "statistics",
    "subprocess", "textwrap", "threading", "typing", "unittest", "urllib.request",
]  # fmt: skip

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": True,
}


def training_text() -> list[str]:
    """Return the tokenizer's training text, in a fixed order."""
    topics = importlib.import_module("pydoc_data.topics").topics
    texts = [topics[name] for name in sorted(topics)]
    for name in DOCSTRING_MODULES:
        module = importlib.import_module(name)
        members = [module, *(member for _, member in sorted(vars(module).items()) if callable(member))]
        texts += [text for text in map(inspect.getdoc, members) if text]
    return texts


def make_tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer: every text round-trips, without an unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the text yielded only {tokenizer.get_vocab_size()} entries")
    return tokenizer


def make_weights() -> dict[str, torch.Tensor]:
    """Make random weights whose next-token distribution is neither flat nor concentrated on one token.

    The embedding is tied to the LM head, so whatever part of it survives in the residual stream favours repeating the
    last token. It is small compared to what the layers add, so that effect is negligible; the last norm's gain then
    sets the spread of the logits.
    """
    generator = np.random.default_rng(SEED)
    D, F = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    E = CONFIG["head_dim"]
    Q, KV = CONFIG["num_attention_heads"] * E, CONFIG["num_key_value_heads"] * E

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        values = generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)
        return torch.from_numpy(values).to(torch.bfloat16)

    def filled(size: int, value: float = 1.0) -> torch.Tensor:
        return torch.full((size,), value, dtype=torch.bfloat16)

    embedding_std = 0.05
    tensors = {"model.embed_tokens.weight": normal(VOCAB_SIZE, D, embedding_std)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": filled(D),
            prefix + "self_attn.q_proj.weight": normal(Q, D, D**-0.5),
            prefix + "self_attn.k_proj.weight": normal(KV, D, D**-0.5),
            prefix + "self_attn.v_proj.weight": normal(KV, D, D**-0.5),
            prefix + "self_attn.o_proj.weight": normal(D, Q, Q**-0.5),
            prefix + "self_attn.q_norm.weight": filled(E, 1.5),
            prefix + "self_attn.k_norm.weight": filled(E, 1.5),
            prefix + "post_attention_layernorm.weight": filled(D),
            prefix + "mlp.gate_proj.weight": normal(F, D, D**-0.5),
            prefix + "mlp.up_proj.weight": normal(F, D, D**-0.5),
            prefix + "mlp.down_proj.weight": normal(D, F, F**-0.5),
        }
    logit_std = 2.0
    tensors["model.norm.weight"] = filled(D, logit_std / (embedding_std * math.sqrt(D)))
    return tensors


def main(folder: Path) -> None:
    """Write the checkpoint into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {token: SPECIAL_TOKENS.index(token) for token in SPECIAL_TOKENS}
    documents = {
        "config.json": CONFIG,
        "generation_config.json": {
            "do_sample": True,
            "temperature": 0.8,
            "top_p": 0.95,
            "eos_token_id": [special["<|im_end|>"], special["<|endoftext|>"]],
            "pad_token_id": special["<|endoftext|>"],
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITIONS,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {
                str(index): {
                    "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                    "special": True,
                }
                for token, index in special.items()
            },
            "chat_template": CHAT_TEMPLATE,
        },
    }  # fmt: skip
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(make_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it readable by the owner only, unlike the other files


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "tiny")
