"""Measure the executor alone, in the shape of Qwen3-0.6B with dummy weights, against the limits of this machine.

    python -m bench.execution [--json] [--quick] [--executor cpu] [--layers 28] [--rounds 5]
        [--format bf16|int8|int4] [--activations float|int8] [--kv-cache-dtype auto|int8] [--context 512]
        [--streams 1 8 32] [--shared 2048]

Limits are measured in the same run, each the best of torch's kernels and our own: bytes read per second (torch's sum
over more memory than any cache, and our product of one row with a large matrix, which reads as a step does) and
operations per second (the instruction's own rate, in registers; torch's matrix product in bfloat16 and float32; ours
with a bfloat16 matrix and with one in the format of the weights, of some rows and of many. With activations in 8 bits
these are ours in that format alone, since no other product is of these numbers). With `QUIPU_CPU_ISA=avx2` torch, too,
is limited to AVX2. A step's limit is the larger of its bytes (weights as they are held, and the KV that it reads)
divided by the first and its operations divided by the second; `share_of_limit` is the fraction of the limit that was
reached, `limited_by` the rate that decides. On a machine shared with others the memory bandwidth changes by the minute,
here by a factor of two. So each row is compared with limits measured right before and after it, for about as long as a
step; a row's numbers are those of the round with the median share. The printed rates are the best of the whole run.

With `--shared N` each decode is measured twice: with N more tokens before its context of which every row has a copy,
and with N that all rows share, in the same blocks. The minimum of bytes then has them once. The rows `speedup` have the
median of the ratios of both in each round.

The rows `nan_check` say which share of a step the pass over its logits takes that looks for NaN and +inf; it also finds
the maximum, which every draw needs. Their limit is 0.5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# the same setting as in the server's engine process; torch reads it once, when it loads
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
if os.environ.get("QUIPU_CPU_ISA") == "avx2":  # the limits are those of the same instruction set
    os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

import attrs
import torch

from bench.machine_limits import QUICK_SIZES, Limits, LimitSizes, Rates
from bench.shapes import QWEN3_06B as SHAPE
from bench.shapes import TINY
from bench.step_works import BLOCK_SIZE, CONTEXT, FORMATS, STREAMS, Setting, Work, make_batch
from bench.timing import best_s
from quipu.kernels.backend import Backend, BackendConfig, MemoryPlan
from quipu.kernels.batch import StepBatch
from quipu.kernels.cpu.build import choose_instruction_set, load, processor_flags
from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.cpu.sampler import decided
from quipu.kernels.load import load_backend
from quipu.kernels.reference.reference_backend import ReferenceBackend
from quipu.kernels.transformers_runner.transformers_backend import TransformersBackend


def make_backend(setting: Setting, folder: Path) -> Backend:
    """Load dummy weights in this shape, with room for the largest row."""
    (folder / "config.json").write_text(json.dumps(SHAPE))
    backend = load_backend(
        setting.executor,
        BackendConfig(
            model_path=folder,
            dtype="auto",
            load_format="dummy",
            block_size=BLOCK_SIZE,
            num_blocks=setting.num_blocks,
            max_num_seqs=setting.max_num_seqs,
            max_model_len=setting.max_model_len,
            max_num_batched_tokens=2048,
            quantization=FORMATS[setting.format],
            activations=setting.activations,
            kv_cache_dtype=setting.kv_cache_dtype,
        ),
    )
    if isinstance(backend, CpuBackend | ReferenceBackend | TransformersBackend):
        backend.cache.fill(0.0)  # rows read a context that nothing has written: whatever the memory held before
    return backend


@attrs.frozen
class Sample:
    """One round of one row, and the best rate of each kind that was measured right before and after it."""

    step_s: float
    rates: Rates

    def row(self, work: Work, plan: MemoryPlan) -> dict[str, Any]:
        tokens = work.num_rows * work.num_tokens
        reading_s, multiplying_s = work.bytes_read(plan) / self.rates.read, work.operations() / self.rates.products
        least_s = max(reading_s, multiplying_s)
        return {
            "value": tokens / self.step_s,
            "unit": "tokens/s",
            "limit": tokens / least_s,
            "limited_by": "reading" if reading_s > multiplying_s else f"products {self.rates.product}",
            "share_of_limit": least_s / self.step_s,
        }


CHECK_LIMIT = 0.005
"""Most of a step that looking for NaN and +inf in its logits may take."""


def check_job(backend: Backend, batch: StepBatch) -> Callable[[], object] | None:
    """Return what to time for looking at the logits of a step: the pass that also finds each row's maximum.

    So it is an upper bound, without which no token could be drawn. None: this backend has no such pass of its own.
    """
    if not isinstance(backend, CpuBackend):
        return None
    rows = list(range(len(batch.slots)))
    logits_MV = torch.randn(len(rows), SHAPE["vocab_size"]).numpy()
    library = load(choose_instruction_set(processor_flags()))
    return partial(decided, library, batch, rows, logits_MV, num_threads=backend.num_threads)


def check_row(name: str, shares: list[float]) -> dict[str, Any]:
    """Return the row of a check that took these shares of a step."""
    share = sorted(shares)[(len(shares) - 1) // 2]
    row = {"name": f"nan_check, {name}", "value": share, "unit": "of a step", "limit": CHECK_LIMIT}
    return {**row, "share_of_limit": share / CHECK_LIMIT}


def speedup_row(work: Work, samples: Mapping[Work, Sequence[Sample]]) -> dict[str, Any]:
    """Return how many times as fast a step is as one whose rows each have a copy of what they share here."""
    (alone,) = (seen for other, seen in samples.items() if other.num_rows == work.num_rows and not other.shared)
    ratios = [each.step_s / ours.step_s for each, ours in zip(alone, samples[work], strict=True)]
    return {"name": f"speedup, {work.name}", "value": statistics.median(ratios), "unit": "times"}


def measure(setting: Setting, rounds: int, sizes: LimitSizes) -> dict[str, Any]:
    """Run all rows in alternation; return the round with the median share for each."""
    with tempfile.TemporaryDirectory() as folder:
        backend = make_backend(setting, Path(folder))
        batches = {work: make_batch(work, setting.num_blocks) for work in setting.works()}
        for batch in batches.values():  # the first run touches memory for the first time
            backend.step(batch)
        limits = Limits(sizes, FORMATS[setting.format], setting.activations)
        samples: dict[Work, list[Sample]] = {work: [] for work in batches}
        checks = {work: job for work, batch in batches.items() if (job := check_job(backend, batch)) is not None}
        shares: dict[Work, list[float]] = {work: [] for work in checks}
        for _ in range(rounds):
            for work, batch in batches.items():
                before = limits.measure()
                step_s = best_s(partial(backend.step, batch), 1 if work.num_tokens > 1 else 3)
                samples[work].append(Sample(step_s, before.better(limits.measure())))
                if work in checks:
                    shares[work].append(best_s(checks[work], 3) / step_s)
        capabilities, plan = backend.capabilities, backend.memory_plan
        backend.close()
    rows = []
    for work, seen in samples.items():
        described = sorted((sample.row(work, plan) for sample in seen), key=lambda row: row["share_of_limit"])
        rows.append({"name": work.name, **described[(len(described) - 1) // 2]})
    rows += [speedup_row(work, samples) for work in samples if work.shared]
    rows += [check_row(work.name, seen) for work, seen in shares.items()]
    return {
        "rows": rows,
        "limits": {name: rate / 1e9 for name, rate in limits.best.items()},
        "executor": capabilities.name,
        "instruction_set": capabilities.instruction_set,
        "weights": capabilities.weights,
        "activations": capabilities.activations,
        "kv_cache_dtype": capabilities.kv_cache_dtype,
        "context": setting.context,
        "shared": setting.shared,
        "layers": SHAPE["num_hidden_layers"],
        "num_threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.execution", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny model, one round")
    parser.add_argument("--executor", choices=["auto", "cpu", "reference", "transformers"], default="auto")
    parser.add_argument("--layers", type=int, default=28, help="fewer are faster, but give the LM head more weight")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--format", choices=FORMATS, default="bf16", help="of the weights")
    parser.add_argument("--activations", choices=["float", "int8"], default="float", help="with quantized weights")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "int8"], default="auto")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of context of a decode")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="rows of the decodes")
    parser.add_argument(
        "--shared", type=int, default=0, help="more tokens before the context, once of each row and once shared"
    )
    arguments = parser.parse_args()
    SHAPE["num_hidden_layers"] = arguments.layers
    setting = Setting(
        executor=arguments.executor,
        format=arguments.format,
        activations=arguments.activations,
        kv_cache_dtype=arguments.kv_cache_dtype,
        context=arguments.context,
        streams=arguments.streams,
        shared=arguments.shared,
    )
    if arguments.quick:
        SHAPE.update(TINY)
        report = measure(setting, 1, QUICK_SIZES)
    else:
        report = measure(setting, arguments.rounds, LimitSizes())
    if arguments.json:
        print(json.dumps(report))
        return
    threads = report["num_threads"]
    print(f"{report['executor']} ({report['instruction_set']}), {threads} threads, {report['layers']} layers")
    print(f"weights {report['weights']}, activations {report['activations']}, KV cache {report['kv_cache_dtype']}")
    for name, rate in report["limits"].items():
        print(f"  {name:28} {rate:10.1f} G{'B' if name.startswith('read') else 'op'}/s")
    print(f"{'':24} {'tokens/s':>10} {'limit':>10} {'share':>7}")
    for row in report["rows"]:
        if row["unit"] == "times":
            print(f"{row['name']:24} {row['value']:10.2f}")
            continue
        form = "10.1f" if row["unit"] == "tokens/s" else "10.3%"
        by = row.get("limited_by", "")
        print(
            f"{row['name']:24} {row['value']:{form}} {row['limit']:{form}} {row['share_of_limit']:7.0%}  {by}".rstrip()
        )


if __name__ == "__main__":
    main()
