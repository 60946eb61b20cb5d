"""Measure decode and prefill against streams and context, for each format of weights, and draw the graphs of the docs.

    python -m bench.graphs [--json] [--quick] [--pictures docs/graphs] [--formats bf16 int8 ...] [--rounds 3]

Steps of the executor alone, in the shape of Qwen3-0.6B with dummy weights, as in `bench.execution`. The formats take
turns, and a point is the best of the rounds: other load on the machine can only make it worse. Decode is measured with
1 to 32 streams at 512 tokens of context, and with one stream at up to 32,768; prefill is 512 tokens, divided among 1 to
32 new prompts, or of one prompt behind up to 32,256 tokens that are there already. `int8-a8` and `int4-a8` have
activations in 8 bits, too. With `--pictures`, an SVG file for each graph is written to that folder.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# as in the server's engine process; torch reads it once, when it loads
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import attrs

from bench.line_graph import Line, line_graph
from bench.shapes import QWEN3_06B as SHAPE
from bench.shapes import TINY
from bench.step_works import BLOCK_SIZE, FORMATS
from bench.timing import best_s
from quipu.kernels.backend import BackendConfig
from quipu.kernels.batch import StepBatch
from quipu.kernels.cpu.cpu_backend import CpuBackend

PREFILL = 512
"""Tokens of a prefill."""


@attrs.frozen
class Point:
    """One step: rows of `num_tokens` new tokens each, at the end of `context` tokens."""

    graph: str
    at: int
    """Where it is on the horizontal axis."""
    num_rows: int
    num_tokens: int
    context: int


@attrs.frozen
class Sizes:
    """Which points are measured."""

    streams: Sequence[int] = (1, 2, 4, 8, 16, 32)
    contexts: Sequence[int] = (512, 2048, 8192, 32_768)
    decode_context: int = 512
    prefill: int = PREFILL

    def points(self) -> Iterator[Point]:
        for num in self.streams:
            yield Point("decode, by streams", num, num, 1, self.decode_context)
            yield Point("prefill, by streams", num, num, self.prefill // num, self.prefill // num)
        for context in self.contexts:
            yield Point("decode, by context", context, 1, 1, context)
            yield Point("prefill, by context", context, 1, self.prefill, context)

    @property
    def num_blocks(self) -> int:
        tokens = max(point.num_rows * point.context for point in self.points())
        return 1 + tokens // BLOCK_SIZE


QUICK = Sizes(streams=(1, 2), contexts=(64, 128), decode_context=64, prefill=64)


def settings_of(name: str) -> dict[str, Any]:
    """Return a backend's settings for a format, `-a8` meaning activations in 8 bits."""
    weights = name.removesuffix("-a8")
    if weights not in FORMATS or (name != weights and FORMATS[weights] is None):
        raise ValueError(f"unknown format {name!r}: choose {', '.join(DEFAULT_FORMATS)}")
    return {"quantization": FORMATS[weights], "activations": "int8" if name != weights else "auto"}


DEFAULT_FORMATS = ("bf16", "int8", "int4", "int8-a8", "int4-a8")


def make_backend(folder: Path, name: str, sizes: Sizes) -> CpuBackend:
    """Load dummy weights in this format."""
    backend = CpuBackend(
        BackendConfig(
            model_path=folder,
            dtype="auto",
            load_format="dummy",
            block_size=BLOCK_SIZE,
            num_blocks=sizes.num_blocks,
            max_num_seqs=max(sizes.streams),
            max_model_len=max(sizes.contexts),
            max_num_batched_tokens=sizes.prefill,
            **settings_of(name),
        )
    )
    backend.cache.fill(0.0)  # rows read a context that nothing has written
    return backend


def batch_of(point: Point) -> StepBatch:
    """Make greedy rows, each with blocks of its own."""
    per_row = -(-point.context // BLOCK_SIZE)
    return StepBatch(
        slots=list(range(point.num_rows)),
        query_start=[row * point.num_tokens for row in range(point.num_rows + 1)],
        positions=[point.context - point.num_tokens] * point.num_rows,
        token_ids=[7 + 13 * at % 1000 for at in range(point.num_rows * point.num_tokens)],
        block_tables=[list(range(1 + row * per_row, 1 + (row + 1) * per_row)) for row in range(point.num_rows)],
        samples=[True] * point.num_rows,
    )


def measure(names: Sequence[str], sizes: Sizes, rounds: int) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return tokens per second: graph, format, points."""
    best: dict[tuple[Point, str], float] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        for _ in range(rounds):
            for name in names:
                backend = make_backend(folder, name, sizes)
                backend.step(batch_of(next(sizes.points())))  # touches memory for the first time
                for point in sizes.points():
                    batch = batch_of(point)
                    step_s = best_s(partial(backend.step, batch), 3 if point.num_tokens == 1 else 1)
                    rate = point.num_rows * point.num_tokens / step_s
                    best[point, name] = max(best.get((point, name), 0.0), rate)
                backend.close()
    graphs: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for (point, name), rate in best.items():
        graphs.setdefault(point.graph, {}).setdefault(name, []).append((point.at, rate))
    return graphs


def draw(graphs: dict[str, dict[str, list[tuple[int, float]]]], folder: Path) -> list[Path]:
    """Write an SVG file for each graph; return their paths."""
    paths = []
    for title, lines in graphs.items():
        what, axis = title.split(", by ")
        picture = line_graph(
            f"{what}, tokens per second", axis, [Line(name, tuple(points)) for name, points in lines.items()]
        )
        path = folder / f"{what}-by-{axis}.svg"
        path.write_text(picture, "utf-8")
        paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.graphs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny model, one round")
    parser.add_argument("--pictures", type=Path, help="write the graphs to this folder")
    parser.add_argument("--formats", nargs="+", default=DEFAULT_FORMATS, help=f"(default: {' '.join(DEFAULT_FORMATS)})")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.quick:
        SHAPE.update(TINY)
    sizes, rounds = (QUICK, 1) if arguments.quick else (Sizes(), arguments.rounds)
    graphs = measure(arguments.formats, sizes, rounds)
    if arguments.pictures:
        draw(graphs, arguments.pictures)
    if arguments.json:
        print(json.dumps(graphs))
        return
    for title, lines in graphs.items():
        print(f"{title:24}" + "".join(f"{at:>10,}" for at, _ in next(iter(lines.values()))))
        for name, points in lines.items():
            print(f"  {name:22}" + "".join(f"{rate:10.1f}" for _, rate in points))


if __name__ == "__main__":
    main()
