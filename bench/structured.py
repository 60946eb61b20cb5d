"""Measure what outputs that have to match a JSON schema add to a step, and how long schemas take to compile.

    python -m bench.structured [--json] [--quick] [--executor cpu] [--rows 32] [--rounds 30]

The model has the shape of Qwen3-0.6B and dummy weights, the vocabulary 151,936 entries of text, and each row a context
of 512 tokens. A step with some constrained rows and the same step without any run by turns, since a shared machine
changes by the second; `added` is the median of their differences, and `share` its share of the plain step. `waited` is
how long sampling waited for the masks of a step. Rows are greedy, so that a mask saves nothing in the sampler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from bench.execution import CONTEXT, Work, make_backend, make_batch
from bench.peers.checkpoint import make_tokenizer
from bench.shapes import QWEN3_06B, TINY
from bench.timing import best_s
from quipu.actors.executor.grammars import GrammarMasks, Mask, SequenceGrammar
from quipu.actors.messages.sampling import OutputGrammar
from quipu.actors.shared.grammar_library import GrammarLibrary, json_grammar
from quipu.kernels.backend import Backend
from quipu.kernels.batch import StepBatch
from quipu.kernels.logit_processors import Processing

EOS = (2,)
CONSTRAINED = (1, 8, 32)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
FIELDS = {f"field_{i}": {"type": "string", "enum": [f"value_{j}_{i}" for j in range(20)]} for i in range(100)}
SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "person": PERSON,
    "100 required fields": {"type": "object", "properties": FIELDS, "required": list(FIELDS)},
    "2000 strings in an enum": {"enum": [f"value number {i}" for i in range(2000)]},
}


class TimedMasks:
    """Masks of a step, and how long sampling waited for them."""

    def __init__(self, masks: GrammarMasks) -> None:
        self._masks = masks
        self.waited_s = 0.0

    def begin(self, grammars: list[SequenceGrammar]) -> Callable[[], Sequence[Mask]]:
        result = self._masks.begin(grammars)

        def wait() -> Sequence[Mask]:
            began = time.perf_counter()
            found = result()
            self.waited_s = time.perf_counter() - began
            return found

        return wait


class Steps:
    """One batch, run with and without constraints."""

    def __init__(self, backend: Backend, library: GrammarLibrary, num_rows: int) -> None:
        self._backend = backend
        self._masks = TimedMasks(GrammarMasks(library, EOS))
        self._batch = make_batch(Work("structured", num_rows, 1, CONTEXT))
        self._grammar = OutputGrammar(json_grammar(PERSON))
        self._sequences: list[SequenceGrammar] = []
        self._position = 0
        self.waited_s: list[float] = []

    def run(self, num_constrained: int) -> float:
        """Run a step and return its seconds. Rows that have ended begin again."""
        self._position += 1
        batch = attrs.evolve(self._batch, output_position=[self._position] * len(self._batch.slots))
        while len(self._sequences) < num_constrained:
            self._sequences.append(SequenceGrammar(self._grammar, [], ends_early=True))
        began = time.perf_counter()
        token_ids = self._backend.step(self._constrained(batch, num_constrained)).token_ids
        for row, sequence in enumerate(self._sequences[:num_constrained]):
            sequence.add_output(token_ids[row])
        seconds = time.perf_counter() - began
        for row in range(num_constrained):
            if token_ids[row] in EOS:
                self._sequences[row] = SequenceGrammar(self._grammar, [], ends_early=True)
        if num_constrained:
            self.waited_s.append(self._masks.waited_s)
        return seconds

    def _constrained(self, batch: StepBatch, num_constrained: int) -> StepBatch:
        if not num_constrained:
            return batch
        rows, grammars = list(range(num_constrained)), self._sequences[:num_constrained]
        return attrs.evolve(batch, processing=Processing([], [], rows, self._masks.begin(grammars)))


def measure_steps(backend: Backend, library: GrammarLibrary, num_rows: int, rounds: int) -> list[dict[str, Any]]:
    results = []
    for num_constrained in [count for count in CONSTRAINED if count <= num_rows]:
        steps = Steps(backend, library, num_rows)
        steps.run(num_constrained)  # compiles the schema
        steps.waited_s.clear()
        pairs = [(steps.run(0), steps.run(num_constrained)) for _ in range(rounds)]
        plain, added = statistics.median(a for a, _ in pairs), statistics.median(b - a for a, b in pairs)
        results.append(
            {
                "constrained": num_constrained,
                "rows": num_rows,
                "step_ms": plain * 1e3,
                "added_ms": added * 1e3,
                "share": added / plain,
                "waited_ms": statistics.median(steps.waited_s) * 1e3,
            }
        )
    return results


def measure_compiling(library: GrammarLibrary, repeats: int) -> list[dict[str, Any]]:
    results = []
    for name, schema in SCHEMAS.items():
        text = json_grammar(schema)
        seconds = best_s(partial(library.compile, text), repeats)
        results.append({"schema": name, "bytes": len(json.dumps(schema)), "compile_ms": seconds * 1e3})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny model, two rounds")
    parser.add_argument("--executor", default="cpu", choices=("cpu", "reference", "triton"))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    if arguments.quick:
        QWEN3_06B.update(TINY)
        arguments.rows, arguments.rounds = 8, 2
    began = time.perf_counter()
    tokenizer = json.dumps(make_tokenizer(QWEN3_06B["vocab_size"])).encode()
    made = time.perf_counter()
    library = GrammarLibrary(tokenizer, EOS)
    load_s = time.perf_counter() - made
    with tempfile.TemporaryDirectory() as folder:
        backend = make_backend(arguments.executor, Path(folder))
        steps = measure_steps(backend, library, arguments.rows, arguments.rounds)
        backend.close()
    compiling = measure_compiling(library, 1 if arguments.quick else 5)
    if arguments.json:
        print(json.dumps({"tokenizer_load_s": load_s, "steps": steps, "compiling": compiling}))
        return
    print(f"loading a tokenizer of {QWEN3_06B['vocab_size']} entries: {load_s:.2f} s (made in {made - began:.1f} s)")
    print(f"{'constrained':>12} {'of rows':>8} {'step ms':>9} {'added ms':>9} {'share':>7} {'waited ms':>10}")
    for row in steps:
        print(
            f"{row['constrained']:12} {row['rows']:8} {row['step_ms']:9.2f} {row['added_ms']:9.3f} "
            f"{row['share']:7.1%} {row['waited_ms']:10.3f}"
        )
    print(f"{'schema':26} {'bytes':>7} {'compile ms':>11}")
    for row in compiling:
        print(f"{row['schema']:26} {row['bytes']:7} {row['compile_ms']:11.2f}")


if __name__ == "__main__":
    main()
