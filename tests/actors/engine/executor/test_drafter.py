"""The drafter in an engine: drafts of every source, outputs that stay the same, and what is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.engine.executor import drafter as drafter_module
from quipu.actors.engine.executor.draft_depth import PassCosts
from quipu.actors.engine.executor.draft_search import Draft
from quipu.actors.engine.executor.drafter import PATIENCE, Drafter
from quipu.actors.engine.executor.sequence_state import SequenceState
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.accountant import Completed
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.scheduler import StepDone
from quipu.kernels.fake import Dials
from tests.actors.engine.ahead_bench import AheadBench
from tests.actors.engine.engine_bench import EngineBench
from tests.fake_oracle import continuation

LIMITS = SchedulerConfig(
    block_size=4, num_blocks=121, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200, most_draft_tokens=24
)
PERIODIC = {-1: [5, 6, 7, 8, 9] * 30}
"""What every sequence draws: a text that repeats itself."""


class DraftingBench(EngineBench):
    """An engine with a real drafter over the fake backend."""

    def __init__(self, *, shares_outputs: bool = False, replies: Any = None, **dials: Any) -> None:
        drafts = Dials(most_tokens=9, replies=replies or {}, **dials)
        super().__init__(LIMITS, dials=drafts)
        self.drafter = Drafter(max_depth=8, max_tokens=24, shares_outputs=shares_outputs)
        self.executor = Executor(self.executor.backend, max_num_seqs=LIMITS.max_num_seqs, drafter=self.drafter)

    def drafted(self) -> list[tuple[int, int]]:
        """Return, of each draft, how many tokens it had and how many were kept."""
        done = [result for result in self.handled if isinstance(result, StepDone)]
        return [
            (end - d.row_starts[row] - 1, d.row_ends[row] - d.row_starts[row] - 1)
            for d in done
            for row, end in zip(d.draft_rows, d.draft_ends, strict=True)
        ]


def test_repeated_text_takes_fewer_steps() -> None:
    """A text that repeats is drafted from the sequence itself, and is what single steps would draw."""
    bench = DraftingBench(replies=PERIODIC)
    (submission,) = bench.submit([1, 2, 3], 100)
    bench.finish()
    bench.check_at_rest()
    assert submission.tokens == PERIODIC[-1][:100]
    drafted = bench.drafted()
    assert sum(kept for _, kept in drafted) > 70 and len(bench.handled) < 40
    assert all(0 <= kept <= num <= 8 for num, kept in drafted)


def test_wrong_drafts_change_nothing() -> None:
    """Where earlier text does not go on as it did, drafts are rejected, and the output is the same."""
    bench = DraftingBench(num_token_ids=3)
    submissions = [bench.submit([33, 34, 32, 33, index], 80)[0] for index in range(4)]
    bench.finish()
    bench.check_at_rest()
    for submission in submissions:
        assert submission.tokens == continuation(submission.prompt, 80, bench.dials)
    assert any(kept < num for num, kept in bench.drafted())


@pytest.mark.parametrize("shares", [False, True])
def test_recent_outputs(shares: bool) -> None:
    """With `suffix`, the second of two equal answers is drafted from the first, within its domain and until a reset."""
    bench = DraftingBench(shares_outputs=shares, replies={-1: list(range(100, 160))})

    def num_kept(domain: str) -> int:
        bench.handled.clear()
        (submission,) = bench.submit([9, 8, 7, 6, 5], 50, domain=domain)
        bench.finish()
        assert submission.tokens == list(range(100, 150))
        return sum(kept for _, kept in bench.drafted())

    assert num_kept("a") == 0
    assert (num_kept("a") > 30) == shares
    assert num_kept("b") == 0, "another tenant's outputs must not be found"
    bench.batcher.reset_prefix_cache()
    bench.finish()
    assert num_kept("a") == 0, "a reset must forget outputs"


def test_nothing_is_drafted_behind_an_end() -> None:
    """A step that was planned before it was known that a sequence has ended verifies no drafts of it: they would be
    given to nobody, and count as accepted."""
    answer = [5, 6, 7, 8, 9] * 5
    bench = DraftingBench(replies={-1: [*answer, 99, *answer, 99]})
    (submission,) = bench.submit([9, 99, 5, 6, 7, 8], 100, stop_token_ids=(99,))
    bench.finish()
    bench.check_at_rest()
    assert submission.tokens == [*answer, 99]
    done = [result for result in bench.handled if isinstance(result, StepDone)]
    starts = [d.row_starts[row] for d in done for row in d.draft_rows]
    assert len(starts) > 3 and max(starts) < len(submission.prompt) + len(submission.tokens) - 1
    num_yielded = sum(1 + num_kept for _, num_kept in bench.drafted())
    assert num_yielded <= len(submission.tokens)


def test_prediction() -> None:
    """What the client predicts is drafted from the first output on; where it is wrong, from where it is right again."""
    answer = list(range(100, 160))
    bench = DraftingBench(replies={-1: answer})
    predicted = (*answer[:20], 7, 7, *answer[22:50])
    (submission,) = bench.submit([9, 8], 50, prediction=predicted)
    bench.finish()
    bench.check_at_rest()
    assert submission.tokens == answer[:50]
    kept = sum(kept for _, kept in bench.drafted())
    assert kept > 35 and len(bench.handled) < 16
    done = [result for result in bench.handled if isinstance(result, StepDone)]
    assert all(d.predicted_rows == d.draft_rows for d in done), "all drafts come from the prediction"
    account = bench.accounts[0]
    account.complete(Completed(account.request_id, submission.id, 50, FinishReason.LENGTH))
    record = account.record(0.0)
    assert record.accepted_prediction_tokens == record.accepted_draft_tokens == kept
    assert record.rejected_prediction_tokens == record.draft_tokens - kept > 0


def test_steps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step verifies more than the limit, and rows beyond the limit of the search have their turn in later steps."""
    bench = DraftingBench(replies=PERIODIC)
    bench.drafter.max_tokens = 5
    submissions = [bench.submit([1, 2, index], 90)[0] for index in range(4)]
    bench.finish()
    done = [result for result in bench.handled if isinstance(result, StepDone)]
    sizes = [
        sum(end - d.row_starts[row] - 1 for row, end in zip(d.draft_rows, d.draft_ends, strict=True)) for d in done
    ]
    assert max(sizes) == 5
    assert all(submission.tokens == PERIODIC[-1][:90] for submission in submissions)
    monkeypatch.setattr(drafter_module, "MAX_SEARCHED", 1)
    bench = DraftingBench(replies=PERIODIC)
    for index in range(4):
        bench.submit([1, 2, index], 90)
    bench.finish()
    drafting = {d.row_ids[row] for d in bench.handled if isinstance(d, StepDone) for row in d.draft_rows}
    assert len(drafting) == 4
    monkeypatch.undo()
    monkeypatch.setattr(drafter_module, "MAX_OTHERS", 1)
    bench = DraftingBench(replies=PERIODIC)
    for index in range(4):
        bench.submit([1, 2, index], 90)
    bench.finish()
    drafting = {d.row_ids[row] for d in bench.handled if isinstance(d, StepDone) for row in d.draft_rows}
    assert len(drafting) == 4, "each must have its turn"


def test_few_rows_are_searched_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no draft has been worth it for a while, only some rows are searched in a step, each in its turn."""
    searched: list[int] = []

    def find(self: Drafter, drafts: object, recent: object, state: SequenceState, *_: object) -> Draft:
        searched.append(state.tokens[2])
        return Draft([], [])

    monkeypatch.setattr(Drafter, "_find", find)
    bench = DraftingBench(replies={-1: list(range(100, 200))})
    for index in range(4):
        bench.submit([1, 2, index], 60)
    bench.finish()
    num_steps = len(bench.handled)
    late = searched[4 * (PATIENCE + 2) :]
    assert len(late) <= 2 * num_steps and {*late} == {0, 1, 2, 3}
    assert max(map(late.count, late)) - min(map(late.count, late)) <= 2


def test_costly_passes_verify_nothing() -> None:
    """If a token more costs what the first does, nothing is drafted."""
    bench = DraftingBench(replies=PERIODIC)
    bench.drafter.costs = PassCosts.of({1: 1.0, 2: 2.0})
    (submission,) = bench.submit([1, 2, 3], 60)
    bench.finish()
    assert not bench.drafted() and submission.tokens == PERIODIC[-1][:60]


class AheadDraftingBench(AheadBench):
    """The same on a device that runs beside the host."""

    def __init__(self, replies: Any) -> None:
        super().__init__(LIMITS, dials=Dials(most_tokens=9, replies=replies))
        drafter = Drafter(max_depth=8, max_tokens=24, shares_outputs=True)
        self.executor = Executor(self.executor.backend, max_num_seqs=LIMITS.max_num_seqs, drafter=drafter)


def test_steps_go_on_at_once_where_nothing_is_drafted() -> None:
    """Where there is nothing to draft, steps take one position a row, and are launched behind the running one; once the
    text repeats, drafts are verified again."""
    strange, familiar = list(range(100, 160)), [5, 6, 7, 8, 9] * 14
    bench = AheadDraftingBench({-1: strange + familiar})
    (submission,) = bench.submit([1, 2, 3], 120)
    bench.finish()
    bench.check_at_rest()
    assert submission.tokens == (strange + familiar)[:120]
    done = [result for result in bench.handled if isinstance(result, StepDone)]
    assert bench.num_ahead > 40, "most steps of the first part"
    assert len(done) < 60 + PATIENCE + 30, "the second part takes few"
    bench.handled.clear()
    (submission,) = bench.submit([1, 2, 3, 4], 120)
    bench.finish()
    assert submission.tokens == (strange + familiar)[:120]
    assert len(bench.handled) < 30, "a new sequence is drafted from its first tokens on"


def test_untried_drafts_are_learned_from() -> None:
    """Drafts that are not worth verifying tell whether they would have been right, and so when they become worth it."""
    bench = DraftingBench(replies={-1: [5, 6, 7, 8, 9] * 6 + list(range(100, 200)) * 2})
    bench.drafter.costs = PassCosts.of({1: 1.0, 2: 1.55})  # worth it from an acceptance of 0.6 on
    (submission,) = bench.submit([1, 2, 3], 140)
    bench.finish()
    drafted = bench.drafted()
    assert submission.tokens == bench.dials.replies[-1][:140]
    assert sum(kept for _, kept in drafted) > max(10, 0.5 * sum(num for num, _ in drafted))


def test_failed_steps_are_drafted_again() -> None:
    """A pass that raises leaves drafter and sequences as they were."""
    bench = DraftingBench(replies=PERIODIC)
    (submission,) = bench.submit([1, 2, 3], 80)
    for _ in range(14):
        bench.step()
    bench.dials.fail_steps = 1
    bench.finish()
    bench.check_at_rest()
    assert submission.tokens == PERIODIC[-1][:80]
