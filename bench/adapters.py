"""Measure what adapters cost, in the shape of Qwen3-0.6B with dummy weights: steps with them beside steps without.

    python -m bench.adapters [--json] [--quick] [--executor cpu] [--adapters 1 4 16] [--streams 32] [--rank 16]
        [--stored float32|bfloat16] [--format bf16|int8|int4] [--layers 28] [--rounds 7] [--processor-time]
        [--beside [quipu] [vllm]]

Adapters change every linear layer of the model but the output head. `decode`: one token for each stream. `prefill`: as
many new tokens for each stream as fit in a step. `prefill of one prompt`: 256 tokens of one prompt with one adapter.
`none`: no row has an adapter, though some are loaded, beside a model that can have none. Each ratio is the time of the
step without adapters divided by that with them, by turns: the median of `--rounds` pairs. On a machine that others use,
`OMP_NUM_THREADS=1` and `--processor-time` count the time of this process alone. `--beside` asks servers over HTTP
instead (`adapters_beside.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# the same setting as in the server's engine process; torch reads it once, when it loads
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import attrs
import torch
from safetensors.torch import save_file

from bench.adapters_beside import SERVERS, compare_servers
from bench.peers.servers import PeerFailed
from bench.shapes import QWEN3_06B as SHAPE
from bench.shapes import TINY
from bench.step_works import BLOCK_SIZE, CONTEXT, FORMATS, Work, make_batch
from quipu.kernels.backend import Backend, BackendConfig
from quipu.kernels.batch import StepBatch
from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.load import load_backend
from quipu.kernels.reference.reference_backend import ReferenceBackend

ONE_PROMPT = 256
PREFILL = 1024
DECODE_WANTED, PREFILL_WANTED, NONE_WANTED = 0.85, 0.9, 0.98


@attrs.frozen
class Setting:
    """What is measured."""

    executor: str
    format: str
    num_adapters: Sequence[int]
    streams: int
    rank: int
    stored: str
    rounds: int
    clock: Callable[[], float] = time.perf_counter

    def config(self, folder: Path, max_loras: int) -> BackendConfig:
        return BackendConfig(
            model_path=folder,
            dtype="auto",
            load_format="dummy",
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            max_num_seqs=self.streams,
            max_model_len=CONTEXT,
            max_num_batched_tokens=PREFILL,
            quantization=FORMATS[self.format],
            max_loras=max_loras,
            max_lora_rank=self.rank,
        )

    @property
    def num_blocks(self) -> int:
        return 1 + self.streams * CONTEXT // BLOCK_SIZE

    @property
    def decode(self) -> StepBatch:
        return make_batch(Work("decode", self.streams, 1, CONTEXT), self.num_blocks)

    @property
    def prefill(self) -> StepBatch:
        length = PREFILL // self.streams
        return make_batch(Work("prefill", self.streams, length, CONTEXT), self.num_blocks)

    @property
    def one_prompt(self) -> StepBatch:
        return make_batch(Work("one prompt", 1, ONE_PROMPT, ONE_PROMPT), self.num_blocks)


@attrs.frozen
class Ratio:
    name: str
    num_adapters: int
    median: float
    """Of the times without adapters divided by those with them."""
    lowest: float
    highest: float
    wanted: float
    without_ms: float
    """The median."""


def save_adapter(folder: Path, rank: int, stored: str, seed: int) -> None:
    """Save an adapter of random numbers of all linear layers, as PEFT does."""
    hidden, mlp, width = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    queries, keys = width * SHAPE["num_attention_heads"], width * SHAPE["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for module, (rows, columns) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for which, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                matrix = torch.randn(shape, generator=random) * 0.01
                tensors[f"{name}.lora_{which}.weight"] = matrix.to(getattr(torch, stored))
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in shapes}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def load_adapters(backend: Backend, setting: Setting) -> list[str]:
    digests = []
    for seed in range(max(setting.num_adapters)):
        with tempfile.TemporaryDirectory() as name:
            save_adapter(Path(name, "adapter"), setting.rank, setting.stored, seed)
            digests.append(backend.load_adapter(Path(name, "adapter")))
    return digests


def make_backend(config: BackendConfig, executor: str) -> Backend:
    backend = load_backend(executor, config)
    if isinstance(backend, CpuBackend | ReferenceBackend):
        backend.cache.fill(0.0)  # rows read a context that nothing has written: whatever the memory held before
    return backend


def adapted(batch: StepBatch, digests: Sequence[str]) -> StepBatch:
    """Give the rows these adapters in turn."""
    return attrs.evolve(batch, adapters=[digests[row % len(digests)] for row in range(len(batch.slots))])


def compare(
    name: str,
    num_adapters: int,
    wanted: float,
    without: Callable[[], object],
    with_them: Callable[[], object],
    setting: Setting,
) -> Ratio:
    def timed(step: Callable[[], object]) -> float:
        started = setting.clock()
        step()
        return setting.clock() - started

    without(), with_them()
    times, ratios = [], []
    for _ in range(setting.rounds):
        times.append(timed(without))
        ratios.append(times[-1] / timed(with_them))
    median = statistics.median(ratios)
    return Ratio(name, num_adapters, median, min(ratios), max(ratios), wanted, statistics.median(times) * 1000)


def measure(setting: Setting) -> list[Ratio]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        plain = make_backend(setting.config(folder, 0), setting.executor)
        backend = make_backend(setting.config(folder, max(setting.num_adapters)), setting.executor)
        digests = load_adapters(backend, setting)
        found = []

        def add(what: str, batch: StepBatch, count: int, wanted: float) -> None:
            with_them = partial(backend.step, adapted(batch, digests[:count]))
            found.append(compare(what, count, wanted, partial(backend.step, batch), with_them, setting))

        for count in setting.num_adapters:
            add(f"decode of {setting.streams} streams", setting.decode, count, DECODE_WANTED)
            add(f"prefill of {setting.streams} streams", setting.prefill, count, PREFILL_WANTED)
        add("prefill of one prompt", setting.one_prompt, 1, PREFILL_WANTED)
        for what, batch in (("decode", setting.decode), ("prefill", setting.prefill)):
            both = partial(plain.step, batch), partial(backend.step, batch)
            found.append(compare(f"none: {what} of {setting.streams} streams", 0, NONE_WANTED, *both, setting))
        plain.close()
        backend.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny model, one round")
    parser.add_argument("--executor", choices=["auto", "cpu", "reference", "triton"], default="auto")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 16], help="among the streams (1 4 16)")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--stored", choices=["float32", "bfloat16"], default="float32", help="as PEFT saves them")
    parser.add_argument("--format", choices=FORMATS, default="bf16", help="of the model's weights")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processor-time", action="store_true", help="of this process, instead of the wall's")
    parser.add_argument("--beside", nargs="+", choices=SERVERS, help="compare what adapters cost these servers")
    arguments = parser.parse_args()
    if arguments.beside:
        print_servers(arguments)
        return
    SHAPE["num_hidden_layers"] = arguments.layers
    if arguments.quick:
        SHAPE.update(TINY)
        arguments.adapters, arguments.streams, arguments.rank, arguments.rounds = [1, 2], 4, 4, 1
    found = measure(
        Setting(
            executor=arguments.executor,
            format=arguments.format,
            num_adapters=arguments.adapters,
            streams=arguments.streams,
            rank=arguments.rank,
            stored=arguments.stored,
            rounds=arguments.rounds,
            clock=time.process_time if arguments.processor_time else time.perf_counter,
        )
    )
    if arguments.json:
        rows: list[dict[str, Any]] = [attrs.asdict(ratio) for ratio in found]
        print(json.dumps({"rows": rows, "stored": arguments.stored, "format": arguments.format}))
        return
    print(f"{'step':<30}{'adapters':>9}{'without':>12}{'ratio':>8}{'lowest':>8}{'highest':>8}{'wanted':>8}")
    for row in found:
        print(
            f"{row.name:<30}{row.num_adapters:>9}{row.without_ms:>9.1f} ms{row.median:>8.3f}{row.lowest:>8.3f}"
            f"{row.highest:>8.3f}{row.wanted:>8.2f}"
        )


def print_servers(arguments: argparse.Namespace) -> None:
    try:
        rows = compare_servers(
            arguments.beside,
            arguments.adapters,
            arguments.streams,
            arguments.rank,
            arguments.rounds,
            lambda folder, seed: save_adapter(folder, arguments.rank, arguments.stored, seed),
        )
    except PeerFailed as error:
        sys.exit(str(error))
    if arguments.json:
        print(json.dumps({"beside": [attrs.asdict(row) for row in rows]}))
        return
    print(f"{'server':<9}{'adapters':>9}{'tokens/s without':>18}{'ratio':>8}")
    for row in rows:
        print(f"{row.server:<9}{row.num_adapters:>9}{row.num_plain_a_s:>18.1f}{row.ratio:>8.3f}")


if __name__ == "__main__":
    main()
