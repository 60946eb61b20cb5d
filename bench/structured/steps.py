"""What constrained rows add to a step.

A step with some constrained rows and the same step without any run by turns, since a shared machine changes by the
second. Rows are greedy, so that a mask saves nothing in the sampler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from bench.step_works import CONTEXT, Work, make_batch
from bench.structured.schemas import PERSON
from quipu.actors.engine.executor.grammar_entry import Mask
from quipu.actors.engine.executor.grammars import GrammarMasks
from quipu.actors.engine.executor.sequence_grammar import SequenceGrammar
from quipu.actors.grammars.grammar_library import json_grammar
from quipu.actors.messages.sampling import OutputGrammar
from quipu.kernels.backend import Backend
from quipu.kernels.batch import StepBatch
from quipu.kernels.logit_processors import Processing

EOS = (2,)
CONSTRAINED = (1, 8, 32)


class TimedMasks:
    """Masks of a step, and how long sampling waited for them."""

    def __init__(self, masks: GrammarMasks) -> None:
        self._masks = masks
        self.waited_s = 0.0

    def begin(
        self, grammars: list[SequenceGrammar], drafts: Sequence[Sequence[int]] = ()
    ) -> Callable[[], Sequence[Mask]]:
        result = self._masks.begin(grammars)

        def wait() -> Sequence[Mask]:
            began = time.perf_counter()
            found = result()
            self.waited_s = time.perf_counter() - began
            return found

        return wait


class Steps:
    """One batch, run with and without constraints."""

    def __init__(self, backend: Backend, masks: GrammarMasks, num_rows: int) -> None:
        self._backend = backend
        self._masks = TimedMasks(masks)
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


def measure_steps(backend: Backend, tokenizer_json: bytes, num_rows: int, rounds: int) -> list[dict[str, Any]]:
    results = []
    masks = GrammarMasks(tokenizer_json, EOS)
    for num_constrained in [count for count in CONSTRAINED if count <= num_rows]:
        steps = Steps(backend, masks, num_rows)
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
    masks.close()
    return results
