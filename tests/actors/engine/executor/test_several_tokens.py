"""Rows that yield several tokens in a step: which are kept, and that nothing else is tagged, published or booked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from quipu.actors.engine.executor.draft_search import Draft
from quipu.actors.engine.executor.fake_drafter import FakeDrafter
from quipu.actors.engine.executor.grammar_entry import Mask
from quipu.actors.engine.executor.grammars import NoMasks
from quipu.actors.engine.executor.sequence_grammar import SequenceGrammar
from quipu.actors.engine.executor.step_rows import StepRows
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.sampling import LogitRules, OutputGrammar
from quipu.actors.messages.scheduler import StepDone, StepFailed
from quipu.actors.shared.block_keys import chain_keys
from quipu.kernels.fake import NONSENSE, Dials, FakeBackend, draw
from quipu.kernels.fake_rules import draw_by_rules
from quipu.kernels.fake_scores import slot_value
from quipu.kernels.logit_processors import LogitProcessor
from tests.actors.engine.engine_bench import EngineBench
from tests.fake_oracle import continuation

LIMITS = SchedulerConfig(block_size=4, num_blocks=61, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)
PROMPT = [1, 2, 3, 4, 5, 6]


def bench_of(most_tokens: int = 4, limits: SchedulerConfig = LIMITS, **dials: Any) -> EngineBench:
    return EngineBench(limits, dials=Dials(most_tokens=most_tokens, **dials))


def advances(bench: EngineBench) -> Counter[int]:
    """Return how often a decoding row advanced by each number of positions."""
    done = [result for result in bench.handled if isinstance(result, StepDone)]
    return Counter(end - start for d in done for start, end in zip(d.row_starts, d.row_ends, strict=True) if start > 6)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("most_tokens", [1, 2, 3, 4])
def test_tokens_are_those_of_single_steps(most_tokens: int, max_steps_in_flight: int) -> None:
    """However many tokens a row yields, and however many steps overlap, the output and its length are the same."""
    bench = bench_of(most_tokens, attrs.evolve(LIMITS, max_steps_in_flight=max_steps_in_flight))
    submissions = [bench.submit([*PROMPT, index], 30 + index)[0] for index in range(4)]
    bench.finish()
    bench.check_at_rest()
    for submission in submissions:
        assert submission.tokens == continuation(submission.prompt, submission.sampling.max_tokens)
        assert submission.reason == "length"
    assert max(advances(bench)) == most_tokens
    assert min(advances(bench)) == 1, "some row must yield fewer tokens than it may"


@pytest.mark.parametrize("at", range(9))
def test_nothing_after_the_end(at: int) -> None:
    """If a row's tokens include a stop token, neither the tokens after it nor their positions are kept."""
    whole = continuation(PROMPT, 40)
    bench = bench_of()
    (submission,) = bench.submit(PROMPT, 40, stop_token_ids=(whole[at],))
    bench.finish()
    bench.check_at_rest()
    end = whole.index(whole[at]) + 1
    assert (submission.tokens, submission.reason) == (whole[:end], "stop")
    done = [result for result in bench.handled if isinstance(result, StepDone)]
    ends = [d.row_ends[0] for d in done if d.token_ids and d.token_ids[-1] == whole[at]]
    assert ends[0] == len(PROMPT) + end - 1, "the stop token itself must not be computed in the step that samples it"


class NoDrafts(FakeDrafter):
    def propose(self, rows: StepRows) -> dict[int, Draft]:
        return {}


def test_every_step_has_a_row_until_the_end() -> None:
    """A sequence that might end with a step has a row in the next one, too: it most often advances by one position."""
    bench = bench_of(8)
    backend = bench.executor.backend
    assert isinstance(backend, FakeBackend)
    bench.executor = Executor(backend, max_num_seqs=LIMITS.max_num_seqs, drafter=NoDrafts(backend))
    (short,), (long,) = bench.submit(PROMPT, 20), bench.submit([*PROMPT, 7], 60)
    bench.finish()
    bench.check_at_rest()
    for submission in (short, long):
        assert submission.tokens == continuation(submission.prompt, len(submission.tokens), bench.dials)
    done = [result for result in bench.handled if isinstance(result, StepDone)]
    first_id = done[0].row_ids[0]
    assert [at for at, d in enumerate(done) if first_id in d.row_ids] == list(range(20)), "no step leaves it out"


def test_rejected_positions_are_in_no_tag() -> None:
    """After each step, a tag describes what its block contains: it ends before any rejected position."""
    bench = bench_of()
    backend, executor = bench.executor.backend, bench.executor
    assert isinstance(backend, FakeBackend)
    for index in range(3):
        bench.submit([*PROMPT, index], 40)
    num_nonsense = 0
    while bench.plans:
        bench.run_one()
        for state in executor._sequences.values():
            for index, block in enumerate(state.table):
                tag = executor.tags._tags[block]
                start = 4 * index
                held = backend.blocks.of(block)
                nonsense = [slot_value(NONSENSE, start + at) == value for at, value in enumerate(held)]
                num_nonsense += any(nonsense)
                # a block that the sequence has not reached yet may have been another's
                num_filled = 0 if tag is None or start >= state.num_computed else tag.num_filled
                known = state.tokens[start : start + num_filled]
                assert held[:num_filled] == [slot_value(token_id, start + at) for at, token_id in enumerate(known)]
                if num_filled and tag is not None and tag.key is not None:
                    keys = chain_keys(state.keys[0], state.tokens[: start + 4], 4)
                    assert tag.key == keys[-1]
        bench.handle_one()
    assert num_nonsense > 0


def test_next_turn_finds_what_was_kept() -> None:
    """A prompt that continues an answer is granted the blocks that the answer filled, and reads the right tokens."""
    bench = bench_of()
    (first,) = bench.submit(PROMPT, 21)
    bench.finish()
    (second,) = bench.submit([*PROMPT, *first.tokens, 7], 9)
    bench.finish()
    bench.check_at_rest()
    assert second.cached == (len(PROMPT) + 21 - 1) // 4 * 4


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_raise_in_the_middle(failing: int) -> None:
    """A pass that raises after some rows have advanced leaves every sequence as it was; the outputs do not change."""
    bench = bench_of()
    submissions = [bench.submit([*PROMPT, index], 30)[0] for index in range(3)]
    for _ in range(failing):
        bench.step()
    bench.dials.fail_steps = 1
    bench.finish()
    bench.check_at_rest()
    assert any(isinstance(result, StepFailed) for result in bench.handled)
    assert [s.tokens for s in submissions] == [continuation(s.prompt, 30) for s in submissions]


def test_abort_while_several_tokens_are_in_flight() -> None:
    """All tokens in flight of an aborted sequence are void; the positions that ran are booked."""
    bench = bench_of(limits=attrs.evolve(LIMITS, max_steps_in_flight=3))
    gone, other = (bench.submit([*PROMPT, index], 40)[0] for index in range(2))
    bench.step()
    bench.step()
    num_tokens = len(gone.tokens)
    bench.run_one()
    bench.abort(gone)
    bench.finish()
    bench.check_at_rest()
    assert len(gone.tokens) == num_tokens
    assert other.tokens == continuation(other.prompt, 40)


def test_preemption_while_several_tokens_are_in_flight() -> None:
    """With too few blocks, sequences are preempted between steps of several tokens, and continue with the same
    tokens."""
    bench = bench_of(limits=attrs.evolve(LIMITS, num_blocks=20))
    submissions = [bench.submit([*PROMPT, index], 40)[0] for index in range(4)]
    bench.finish()
    bench.check_at_rest()
    assert any(s.num_preempted for s in submissions)
    assert bench.num_advanced_further > 0
    assert [s.tokens for s in submissions] == [continuation(s.prompt, 40) for s in submissions]


def by_rules(rules: LogitRules, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that single steps draw under rules, each from all that precede it."""
    outputs: list[int] = []
    for position in range(count):
        values = [slot_value(token_id, at) for at, token_id in enumerate([*prompt, *outputs])]
        token_id = draw(values, 0, position, Dials())
        outputs.append(draw_by_rules(LogitProcessor(rules, prompt, outputs), token_id))
    return outputs


BUDGET = LogitRules(
    thinking_budget=5, reasoning_opening_ids=(250,), reasoning_closing_ids=(251, 252), prompt_opens_reasoning=True
)
RULES = {
    "penalties": LogitRules(repetition_penalty=9.0, frequency_penalty=20.0),
    "allowed": LogitRules(allowed_token_ids=(40, 41, 42), frequency_penalty=3.0),
    "bad words": LogitRules(allowed_token_ids=(40, 41, 42), bad_words=((40, 41), (42,)), presence_penalty=9.0),
    "budget": BUDGET,
    "budget and bias": attrs.evolve(BUDGET, bias={60: 30.0}),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_hold_inside_a_run(name: str) -> None:
    """Rules (penalties, bad words, thinking budgets) apply to each token of a run with all tokens before it."""
    rules = RULES[name]
    expected = by_rules(rules, PROMPT, 30)
    for most_tokens in (1, 2, 4):
        bench = bench_of(most_tokens, applies_rules=True)
        bench.check_tokens_so_far = lambda: None
        bench.expected_tokens = lambda submission: expected
        (submission,) = bench.submit(PROMPT, 30, rules=rules)
        bench.finish()
        assert submission.tokens == expected
        assert (bench.num_advanced_further > 0) == (most_tokens > 1)
    if "budget" in name:
        assert expected[5:7] == [251, 252]


@pytest.mark.parametrize("min_tokens", [0, 3, 8, 14])
def test_min_tokens_inside_a_run(min_tokens: int) -> None:
    """A stop token is held back inside a run until there are `min_tokens` tokens; from then on it ends the run."""
    whole = continuation(PROMPT, 40)
    stop = whole[2]
    rules = LogitRules(min_tokens=min_tokens, held_back_token_ids=(stop,))
    expected = by_rules(rules, PROMPT, 40)
    end = expected.index(stop) + 1 if stop in expected else 40
    bench = bench_of(applies_rules=True)
    bench.expected_tokens = lambda submission: expected[:end]
    (submission,) = bench.submit(PROMPT, 40, rules=rules, stop_token_ids=(stop,))
    bench.finish()
    assert submission.tokens == expected[:end]
    assert end > min_tokens


def test_rows_with_a_grammar_advance_one() -> None:
    """A mask depends on the last token, so a row with a grammar yields one token a step, while others yield several."""
    bench = bench_of()
    bench.executor._masks = AllMasks()
    (masked,) = bench.submit(PROMPT, 20, grammar=OutputGrammar("x"))
    (free,) = bench.submit([9, *PROMPT], 20)
    bench.finish()
    done = [result for result in bench.handled if isinstance(result, StepDone)]
    going_on = [
        (d.row_ids[row], d.row_ends[row] - start) for d in done for row, start in enumerate(d.row_starts) if start > 6
    ]
    assert {count for sequence_id, count in going_on if sequence_id == masked.id} == {1}
    assert max(count for sequence_id, count in going_on if sequence_id == free.id) > 1
    assert masked.tokens == continuation(PROMPT, 20)


class AllMasks(NoMasks):
    """Allows every token."""

    def begin(
        self, grammars: list[SequenceGrammar], drafts: Sequence[Sequence[int]] = ()
    ) -> Callable[[], Sequence[Mask]]:
        masks = [b"\xff" * 32] * len(grammars)
        return lambda: masks
