"""Make a checkpoint in the shape of Qwen3-0.6B with random weights, for quipu and its peers.

    python -m bench.peers.checkpoint FOLDER [--layers 28] [--quick]

bfloat16 safetensors and a tokenizer of 151,936 entries: the demo model's, extended by pairs of its own entries, so that
text is encoded at a realistic length and every id that a model draws can be decoded. The weights are untrained, so the
text means nothing; timings do not depend on the weights' values. All servers load the same folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.shapes import QWEN3_06B, TINY
from quipu.actors.shared.checkpoint import DEMO

if TYPE_CHECKING:  # it takes a second, and most of those who import this find the checkpoint already made
    import torch

SHAPE: dict[str, Any] = {
    **QWEN3_06B,
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": True,
}
STD = 0.02
SPACES = "ĠĊ"
"""A byte-level vocabulary's characters for the space and the newline."""


def make_tokenizer(size: int) -> dict[str, Any]:
    """Return `tokenizer.json`: the demo's entries and merges, then pairs of its entries, each with its merge."""
    tokenizer: dict[str, Any] = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocabulary.update(added)  # those that the model lacks have the ids after its own
    # of whole characters only: a stream shows an incomplete character with the next token, or never
    whole = [entry for entry in vocabulary if entry not in added and all("!" <= c <= "~" or c in SPACES for c in entry)]
    for left, right in pairs(whole):
        if len(vocabulary) == size:
            break
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append([left, right] if isinstance(merges[0], list) else f"{left} {right}")
    return tokenizer


def pairs(entries: list[str]) -> Iterator[tuple[str, str]]:
    """Yield all pairs, in an order in which every entry soon appears in one."""
    for distance in range(1, len(entries)):
        for at, left in enumerate(entries):
            yield left, entries[(at + distance) % len(entries)]


def make_weights(shape: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the checkpoint; each is seeded by its name."""
    import torch

    hidden, mlp, width = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    query, key_value = shape["num_attention_heads"] * width, shape["num_key_value_heads"] * width
    yield "model.embed_tokens.weight", draw("embedding", shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", key_value, hidden),
            ("self_attn.v_proj", key_value, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", mlp, hidden),
            ("mlp.up_proj", mlp, hidden),
            ("mlp.down_proj", hidden, mlp),
        ):
            yield f"{prefix}{name}.weight", draw(prefix + name, rows, columns)
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", width),
            ("self_attn.k_norm", width),
        ):
            yield f"{prefix}{name}.weight", torch.ones(size, dtype=torch.bfloat16)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)


def draw(name: str, rows: int, columns: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1)
    return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, STD, generator=generator)


def make_checkpoint(folder: Path, **changes: Any) -> Path:
    """Write the checkpoint unless it exists. `changes` override fields of the shape."""
    from safetensors.torch import save_file

    done = folder / "generation_config.json"
    if done.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPE | changes
    (folder / "config.json").write_text(json.dumps(shape, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(make_tokenizer(shape["vocab_size"])))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / name, folder / name)
    save_file(dict(make_weights(shape)), folder / "model.safetensors", metadata={"format": "pt"})
    done.write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0, "do_sample": False}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.checkpoint", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny model")
    arguments = parser.parse_args()
    changes = TINY if arguments.quick else {"num_hidden_layers": arguments.layers}
    make_checkpoint(arguments.folder, **changes)


if __name__ == "__main__":
    main()
