"""Measure the peak memory of loading a checkpoint, in a process of its own.

    python tests/kernels/checkpoints/load_memory.py FOLDER cpu [bfloat16 [int4]]

prints `{"weights", "peak", "peak_anonymous", "left", "left_anonymous"}` in bytes, relative to before the load. `peak`
is the highest resident memory including pages of the mapped files (VmHWM, reset before); `peak_anonymous` excludes
those, and is sampled by a thread every millisecond. `make_large` writes a checkpoint of which two tables are half: a
careless loader holds the largest tensors twice.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def make_large(folder: Path, dtype: torch.dtype) -> Path:
    """Write a checkpoint of 130 million parameters."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"dtype": str(dtype).removeprefix("torch.")}))
    hidden, mlp, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_norm.weight": (128,),
            prefix + "self_attn.k_norm.weight": (128,),
            prefix + "self_attn.q_proj.weight": (2048, hidden),
            prefix + "self_attn.k_proj.weight": (1024, hidden),
            prefix + "self_attn.v_proj.weight": (1024, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, 2048),
            prefix + "mlp.gate_proj.weight": (mlp, hidden),
            prefix + "mlp.up_proj.weight": (mlp, hidden),
            prefix + "mlp.down_proj.weight": (hidden, mlp),
        }
    save_file(
        {name: torch.full(shape, 0.01, dtype=dtype) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    return folder


def status() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[0] in ("VmRSS:", "VmHWM:", "RssAnon:")
    }


def measure(folder: Path, executor: str, dtype: str, quantization: str | None) -> dict[str, Any]:
    from quipu.kernels.backend import BackendConfig
    from quipu.kernels.cpu.build import load_kernels
    from quipu.kernels.load import load_backend

    torch.set_num_threads(2)
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    if executor == "cpu":
        load_kernels()
    # everything else is small, so that the weights dominate
    config = BackendConfig(
        model_path=folder,
        dtype=dtype,
        load_format="auto",
        quantization=quantization,
        block_size=16,
        num_blocks=9,
        max_num_seqs=1,
        max_model_len=128,
        max_num_batched_tokens=16,
    )
    highest, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            highest[0] = max(highest[0], status()["RssAnon"])

    before = status()
    Path("/proc/self/clear_refs").write_text("5")
    sampler = threading.Thread(target=sample)
    sampler.start()
    backend = load_backend(executor, config)
    done.set()
    sampler.join()
    after = status()
    return {
        "weights": backend.memory_plan.weights_bytes,
        "peak": after["VmHWM"] - before["VmRSS"],
        "peak_anonymous": highest[0] - before["RssAnon"],
        "left": after["VmRSS"] - before["VmRSS"],
        "left_anonymous": after["RssAnon"] - before["RssAnon"],
    }


if __name__ == "__main__":
    _, model, backend_name, *more = sys.argv
    wanted, quantized = (*more, "auto", None)[0], more[1] if len(more) > 1 else None
    print(json.dumps(measure(Path(model), backend_name, str(wanted), quantized)))
