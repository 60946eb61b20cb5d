"""The history that logit processors see: every token before the next sampled one, and none after.

The fake backend's tokens are a function of prompt and position, so the expected history is known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast
from unittest import mock

import attrs
import pytest

from quipu.actors.engine.executor.grammar_entry import Mask
from quipu.actors.engine.executor.grammars import NoMasks
from quipu.actors.engine.executor.sequence_grammar import SequenceGrammar
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.sampling import LogitRules, OutputGrammar
from quipu.actors.messages.scheduler import StepDropped, StepFailed
from quipu.kernels.backend import Backend, RunsAtOnce
from quipu.kernels.batch import Drawn, StepBatch
from quipu.kernels.fake import FakeBackend
from quipu.kernels.logit_processors import Processing
from quipu.kernels.seen_tokens import SeenTokens
from tests.actors.engine.engine_bench import EngineBench
from tests.actors.engine.reported_sequences import Submission
from tests.fake_oracle import continuation

RULES = LogitRules(repetition_penalty=1.3, frequency_penalty=0.5)
LIMITS = SchedulerConfig(block_size=4, num_blocks=31, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=100)


@attrs.define
class Spy(RunsAtOnce):
    """Wraps a bench's backend and inspects every row with rules."""

    bench: EngineBench
    backend: FakeBackend
    seen: list[Processing | None] = attrs.field(factory=list)
    num_checked: int = 0

    @classmethod
    def on(cls, bench: EngineBench) -> Spy:
        spy = cls(bench, bench.executor.backend)
        bench.executor.backend = cast(Backend, spy)
        return spy

    def step(self, batch: StepBatch) -> Drawn:
        self.seen.append(batch.processing)
        if batch.processing is not None:
            by_slot = {state.slot: i for i, state in self.bench.executor._sequences.items()}
            for row, processor in zip(batch.processing.rows, batch.processing.processors, strict=True):
                assert batch.samples[row]
                submission = self.bench.submissions[by_slot[batch.slots[row]]]
                self.check(submission, batch.output_position[row], processor.outputs, processor.seen)
        return self.backend.step(batch)

    def check(self, submission: Submission, position: int, outputs: list[int], seen: SeenTokens) -> None:
        seed = submission.sampling.seed if submission.sampling.temperature else 0
        expected = continuation(submission.prompt, position, self.bench.dials, seed)
        assert outputs == expected
        assert dict(zip(seen.output_ids.tolist(), seen.counts.tolist(), strict=True)) == Counter(expected)
        assert set(seen.prompt_ids.tolist()) == set(submission.prompt)
        self.num_checked += 1


def test_history_with_chunks_and_cache_hits() -> None:
    """The history is complete for prompts computed in chunks, and then from the cache, while steps overlap."""
    bench = EngineBench(LIMITS)
    spy = Spy.on(bench)
    prompt = [*range(100, 140), 100]
    for _ in range(2):
        bench.submit(prompt, 9, rules=RULES, seed=7, num_choices=2)
        bench.finish()
    assert bench.submissions[3].cached == 40
    assert spy.num_checked >= 4 * 9


def test_history_survives_preemption() -> None:
    """After a preemption, the history contains the known outputs, and not the void ones."""
    bench = EngineBench(attrs.evolve(LIMITS, num_blocks=16))
    spy = Spy.on(bench)
    for index in range(4):
        bench.submit(list(range(100 + index, 110 + index)), 24, rules=RULES, seed=index)
    bench.finish()
    assert any(submission.num_preempted for submission in bench.submissions.values())
    assert spy.num_checked >= 4 * 24


def test_history_survives_dropped_step() -> None:
    """One step fails, and again when retried; the history of a sequence that was only in the dropped step after it is
    complete."""
    bench = EngineBench(LIMITS)
    spy = Spy.on(bench)
    (first,) = bench.submit([1, 2, 3], 12, rules=RULES)
    bench.step()
    (second,) = bench.submit([4, 5, 6, 7, 8], 12, rules=RULES)
    bench.dials.fail_steps = 2
    bench.finish()
    assert [type(result) for result in bench.handled[1:3]] == [StepFailed, StepDropped]
    assert first.error is not None and second.error is None
    assert spy.num_checked == 1 + 2 + 12


def test_no_processing_without_rules() -> None:
    """No step of a request without rules has a `processing`, even after one that did."""
    bench = EngineBench(LIMITS)
    spy = Spy.on(bench)
    bench.submit([1, 2, 3], 3, rules=RULES)
    bench.finish()
    assert spy.seen and all(spy.seen)
    spy.seen.clear()
    bench.submit([1, 2, 3, 4], 6)
    bench.finish()
    assert spy.seen and not any(spy.seen)


def test_masks_are_made_while_the_backend_runs() -> None:
    """A step's masks are begun before the backend runs and awaited only by it. They are those of the rows with
    grammars, whose history has every earlier output, through chunks and preemptions.
    """
    bench = EngineBench(attrs.evolve(LIMITS, num_blocks=16))
    order = ""
    num_masked = 0

    class Masks(NoMasks):
        def begin(
            self, grammars: list[SequenceGrammar], drafts: Sequence[Sequence[int]] = ()
        ) -> Callable[[], Sequence[Mask]]:
            nonlocal order, num_masked
            order += "begin "
            num_masked += len(grammars)
            for grammar in grammars:
                assert grammar.answer == continuation([int(grammar.text), 8, 9], len(grammar.answer))

            def wait() -> Sequence[Mask]:
                nonlocal order
                order += "wait "
                return [b"\xff" * 32] * len(grammars)

            return wait

    bench.executor._masks = Masks()
    backend = bench.executor.backend
    step = backend.step

    def watched(batch: StepBatch) -> Drawn:
        nonlocal order
        order += "step "
        return step(batch)

    with mock.patch.object(backend, "step", watched):
        for first in (5, 6, 7):
            bench.submit([first, 8, 9], 20, grammar=OutputGrammar(str(first)))
        bench.submit([4, 8, 9], 30)
        bench.finish()
    assert any(submission.num_preempted for submission in bench.submissions.values())
    assert num_masked >= 3 * 20
    assert re.fullmatch("((begin step wait |step )+)", order), order


@pytest.mark.parametrize("rules", [None, RULES])
def test_ended_sequence_is_forgotten(rules: LogitRules | None) -> None:
    """Nothing is kept of an ended sequence, with or without rules."""
    bench = EngineBench(LIMITS)
    bench.submit([1, 2, 3], 3, rules=rules)
    bench.finish()
    assert list(bench.executor._sequences) == [1], "its release comes with the next plan"
    bench.submit([9], 1)
    bench.finish()
    assert list(bench.executor._sequences) == [2]
    assert not bench.executor._table.some_have_rules
