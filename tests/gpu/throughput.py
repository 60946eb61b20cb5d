"""Compare `quipu bench throughput` with transformers' `generate`, on one random checkpoint in Qwen3-0.6B's shape."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.peers.checkpoint import make_checkpoint
from tests.gpu.machine import Machine

INPUT, OUTPUT = 64, 128
_NEEDED = ["trio", "quart_trio", "hypercorn", "msgspec", "orjson", "structlog", "sqlalchemy", "zmq", "httpx2"]


def throughput(machine: Machine) -> list[dict[str, Any]]:
    """Measure output tokens per second at 1, 8 and 64 sequences. Raises RuntimeError naming missing packages."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"not installed: {', '.join(missing)} (`make gpu-wheels` collects what quipu imports)")
    executor, output = ("reference", 4) if machine.rehearsal else ("triton", OUTPUT)
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder, "model"), **({"num_hidden_layers": 1} if machine.rehearsal else {}))
        counts = (2,) if machine.rehearsal else (1, 8, 64)
        ours = [_quipu(path, count, executor, output) for count in counts]
        model = _transformers(machine, path)  # loaded only now: before, quipu needs the GPU's memory
        theirs = [_generate(machine, model, count, output) for count in counts]
    return [
        {"name": f"{count} sequences", "quipu": own, "transformers": other, "ratio": own / other}
        for count, own, other in zip(counts, ours, theirs, strict=True)
    ]


def _quipu(path: Path, count: int, executor: str, output: int) -> float:
    command = [
        sys.executable, "-m", "quipu.web.cli.cli", "bench", "throughput", "--model", str(path), "--executor", executor,
        "--num-prompts", str(count), "--input-len", str(INPUT), "--output-len", str(output), "--max-num-seqs", "64",
        "--max-model-len", "1024", "--kv-cache-memory", "8GiB" if executor == "triton" else "1GiB", "--json",
        "--disable-tqdm",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"quipu bench throughput: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout)["output_tokens_per_second"])


def _transformers(machine: Machine, path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(machine.place).eval()


@torch.inference_mode()
def _generate(machine: Machine, model: Any, count: int, output: int) -> float:
    token_ids = torch.randint(10, 1000, (count, INPUT), device=machine.place)
    took_s = 0.0
    for _ in range(2):  # the first warms up
        machine.synchronize()
        started = time.perf_counter()
        made = model.generate(
            token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=output, min_new_tokens=output,
            do_sample=False,
        )  # fmt: skip
        machine.synchronize()
        took_s = time.perf_counter() - started
        assert made.shape[1] == INPUT + output
    return count * output / took_s
