"""The account of one request: when it balances, when it is disputed, and which numbers its client gets."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.accountant.account import Account
from quipu.actors.accountant.account_entries import Ended, Gap, Span
from quipu.actors.accountant.applied_effects import AppliedEffects
from quipu.actors.accountant.coverage import Coverage
from quipu.actors.messages.accountant import Completed
from quipu.actors.messages.counts import UNKNOWN, Known
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.actors.messages.usage_record import UsageRecord
from tests.actors.accountant.accounts import (
    account_of,
    admission,
    admit,
    compute,
    finish,
    first_token,
    new_account,
    write,
)


def record_of(account: Account) -> UsageRecord:
    return account.record(20.0)


# ---------------------------------------------------------------- coverage


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_coverage_counts_each_position_once(spans: list[tuple[int, int]]) -> None:
    """Whatever spans are added in whatever order, the result is a set of positions in disjoint ascending intervals."""
    coverage, positions = Coverage(), set[int]()
    for start, end in spans:
        new = set(range(start, end)) - positions
        assert coverage.add(start, end) == len(new)
        positions |= new
        assert coverage.total == len(positions)
        flat = [edge for interval in coverage.intervals for edge in interval]
        assert flat == sorted(set(flat)), "intervals touch, overlap or are empty"
        assert {p for low, high in coverage.intervals for p in range(low, high)} == positions


# ---------------------------------------------------------------- predictions


def test_prediction_that_is_given() -> None:
    """Of what a client predicts, it is told of what it was given: nothing behind its last token, where the engine goes
    on until it hears of a stop string, and no tokens twice that were void and drawn again."""
    account = account_of(10)
    drafted = account.sequences[1].drafted
    drafted.add(11, 14, 15, is_predicted=True)
    drafted.add(15, 16, 18, is_predicted=False)
    drafted.add(17, 21, 21, is_predicted=True)
    drafted.add(22, 24, 24, is_predicted=True)
    for num_tokens, told in ((1, (0, 0)), (3, (2, 2)), (7, (3, 1)), (9, (5, 3)), (14, (9, 1))):
        account.complete(Completed("", 1, num_tokens, FinishReason.STOP))
        record = record_of(account)
        assert (record.accepted_prediction_tokens, record.rejected_prediction_tokens) == told
        assert (record.draft_tokens, record.accepted_draft_tokens) == (13, 10)
    drafted.add(13, 17, 17, is_predicted=True)
    record = record_of(account)
    assert (record.accepted_prediction_tokens, record.rejected_prediction_tokens) == (7, 1)


# ---------------------------------------------------------------- accounts that balance


def test_hit_and_computed_rest_balance() -> None:
    """16 of 40 tokens are read and 24 computed in two chunks; outputs do not count towards the prompt."""
    account = account_of(40)
    admit(account, 1, 1, 16, 16)
    compute(account, 1, (16, 32), (32, 40), (40, 41), (41, 42))
    write(account, 1, 16, 32)
    finish(account, 1, num_tokens=3)
    record = record_of(account)
    assert account.problems() == []
    assert record.outcome is Outcome.FINISHED
    assert (record.prompt, record.cached, record.cache_write) == (Known(40), Known(16), Known(16))
    assert (record.computed_tokens, record.restored_tokens, record.recomputed_tokens) == (24, 0, 0)
    assert record.completion_tokens == 3
    assert record.cached_by_tier == {"device": 16, "host": 0, "disk": 0, "remote": 0, "unattributed": 0}
    assert not record.disputed


def test_times_are_unix_seconds() -> None:
    """Entries have times of the process's own clock, records have Unix times."""
    account = account_of(40)
    admit(account, 1, 1, 0, 0)
    first_token(account, 1, at=12.5)
    record = record_of(account)
    assert (record.received_at, record.admitted_at) == (1_000_010.0, 1_000_011.0)
    assert (record.first_token_at, record.closed_at) == (1_000_012.5, 1_000_020.0)


def test_first_of_several_prompts() -> None:
    """The first token is the earliest one, and the engine that of the admission which was counted first, in whatever
    order the prompts are booked when the account is made again."""
    applied = AppliedEffects()
    account = account_of(40, 40)
    second = attrs.evolve(admission(1, 0, 0), engine_id=1, incarnation=2)
    account.apply(2, second)
    applied.note_first_admission(account)
    again = account_of(40, 40)
    applied.keep_first_admission(again)
    again.apply(1, attrs.evolve(admission(1, 0, 0), engine_id=0, incarnation=1))
    first_token(again, 1, at=13.5)
    again.apply(2, second)
    first_token(again, 2, at=12.5)
    record = record_of(again)
    assert (record.engine, record.incarnation, record.first_token_at) == (1, 2, 1_000_012.5)


def test_zero_is_known_and_no_admission_is_unknown() -> None:
    """A miss reports 0 cached tokens; a request that was never admitted reports none."""
    missed, waiting = account_of(8), account_of(8)
    admit(missed, 1, 1, 0, 0)
    assert record_of(missed).cached == Known(0)
    record = record_of(waiting)
    assert (record.prompt, record.cached, record.cached_by_tier, record.cache_write) == (
        UNKNOWN,
        UNKNOWN,
        None,
        UNKNOWN,
    )
    assert not record.disputed


def test_preemption_does_not_change_reported_numbers() -> None:
    """Positions that a readmission reads from the cache are restored, not cached; the rest is recomputed."""
    account = account_of(40)
    admit(account, 1, 1, 16, 16)
    compute(account, 1, (16, 24))
    admit(account, 1, 2, 32, 32)
    compute(account, 1, (32, 40))
    finish(account, 1)
    sequence = account.sequences[1]
    assert account.problems() == []
    assert account.cached == Known(16)
    assert (sequence.read, sequence.computed_first, sequence.restored_first, sequence.recomputed) == (16, 16, 8, 24)


def test_readmission_without_hit_recomputes() -> None:
    """Positions covered again are recomputed, outputs included, and the frozen count stays."""
    account = account_of(20)
    admit(account, 1, 1, 16, 16)
    compute(account, 1, (16, 20), (20, 21))
    admit(account, 1, 2, 0, 0)
    compute(account, 1, (0, 22))
    finish(account, 1, num_tokens=3)
    sequence = account.sequences[1]
    assert account.problems() == []
    assert account.cached == Known(16)
    assert (sequence.read, sequence.computed_first, sequence.restored_first, sequence.recomputed) == (16, 4, 0, 21)


def test_repeated_admission_counts_once() -> None:
    """A repeated admission adds nothing; a repeated span is recomputed work."""
    account = account_of(20)
    for _ in range(2):
        admit(account, 1, 1, 16, 16)
        compute(account, 1, (16, 20))
    finish(account, 1)
    sequence = account.sequences[1]
    assert account.problems() == []
    assert (len(sequence.admissions), sequence.read, sequence.computed_first, sequence.recomputed) == (1, 16, 4, 4)


def test_cut_short_request_balances_with_part_of_its_prompt() -> None:
    """A half-computed prompt is not disputed if the client left."""
    account = account_of(40)
    admit(account, 1, 1, 16, 16)
    compute(account, 1, (16, 24))
    assert account.problems() == []
    assert account.outcome is Outcome.CANCELLED


# ---------------------------------------------------------------- disputed accounts


def test_executor_confirms_less_than_granted() -> None:
    """A stale grant is disputed, and the reported numbers do not change."""
    account = account_of(40)
    admit(account, 1, 1, 32, 16)
    compute(account, 1, (32, 40))
    finish(account, 1)
    assert account.problems() == [
        "sequence 1: admission 1: reused 32, read 16",
        "sequence 1: prompt 40, read 16, computed 8, restored 0",
    ]
    assert record_of(account).disputed
    assert record_of(account).cached == Known(32)


def test_executor_claims_more_than_granted() -> None:
    """A claim beyond the grant is disputed even if the sum is right."""
    account = account_of(40)
    admit(account, 1, 1, 16, 32)
    compute(account, 1, (16, 40))
    finish(account, 1)
    assert account.problems() == ["sequence 1: admission 1: reused 16, read 32"]


def test_uncovered_prompt_position_is_disputed() -> None:
    """A prompt position that was never covered disputes a finished request."""
    account = account_of(40)
    admit(account, 1, 1, 0, 0)
    compute(account, 1, (0, 16), (24, 40))
    finish(account, 1)
    assert account.problems() == ["sequence 1: prompt 40, read 0, computed 32, restored 0"]


def test_reading_past_the_prompt_is_not_clamped() -> None:
    """A read past the prompt's end disputes even a request that was cut short."""
    account = account_of(8)
    admit(account, 1, 1, 16, 16)
    assert account.problems() == ["sequence 1: prompt 8, read 16, computed 0, restored 0"]
    assert account.cached == Known(16)


def test_missing_first_admission_is_disputed() -> None:
    """A second admission without the first is a gap in the numbering."""
    account = account_of(8)
    admit(account, 1, 2, 0, 0)
    compute(account, 1, (0, 8))
    finish(account, 1)
    assert account.problems() == ["sequence 1: admission 2 follows 0"]


def test_spans_without_admission_are_disputed() -> None:
    """An engine that reports work must report what it reused before the first token."""
    account = account_of(8)
    compute(account, 1, (0, 8))
    first_token(account, 1)
    finish(account, 1)
    assert account.problems() == ["sequence 1: its first token came before any admission"]
    assert (record_of(account).prompt, record_of(account).cached) == (Known(8), UNKNOWN)


def test_mismatch_at_readmission_is_disputed() -> None:
    """Restored tokens need two matching entries like all others."""
    account = account_of(40)
    admit(account, 1, 1, 0, 0)
    compute(account, 1, (0, 40))
    admit(account, 1, 2, 32, 16)
    finish(account, 1)
    assert account.problems() == ["sequence 1: admission 2: reused 32, read 16"]


def test_lost_report_is_disputed() -> None:
    """The account is disputed even if everything else balances, since the report's contents are unknown."""
    account = account_of(8)
    admit(account, 1, 1, 0, 0)
    compute(account, 1, (0, 8))
    account.apply(1, Gap())
    finish(account, 1)
    assert account.problems() == ["sequence 1: a report was lost"]


def test_entry_after_the_end_is_disputed() -> None:
    """A Terminal is the engine's last entry for a sequence, and comes only once."""
    for late in (Span(8, 9), Ended(), admission(2, 0, 0)):
        account = account_of(8)
        admit(account, 1, 1, 0, 0)
        compute(account, 1, (0, 8))
        finish(account, 1)
        account.apply(1, late)
        assert account.problems() == [f"sequence 1: {type(late).__name__} after its end"]


# ---------------------------------------------------------------- choices and lists


def test_choices_count_their_prompt_once() -> None:
    """Cached is what the first choice was granted, whichever choice ends last; hits of other choices do not count."""
    account = account_of(40, num_choices=3)
    admit(account, 1, 1, 0, 0)
    compute(account, 1, (0, 40))
    for sequence_id in (2, 3):
        admit(account, sequence_id, 1, 32, 32)
        compute(account, sequence_id, (32, 40))
    write(account, 1, 0, 32)
    finish(account, 3, 2, 1, num_tokens=5)
    record = record_of(account)
    assert account.problems() == []
    assert (record.prompt, record.cached, record.cache_write) == (Known(40), Known(0), Known(32))
    assert (record.completion_tokens, record.num_choices) == (15, 3)


def test_later_choice_does_not_set_the_numbers() -> None:
    """Until the first choice is admitted the prompt's numbers are unknown, and its readmission does not set them."""
    account = account_of(40, num_choices=2)
    admit(account, 2, 1, 32, 32)
    assert record_of(account).cached == UNKNOWN
    admit(account, 1, 1, 16, 16)
    admit(account, 1, 2, 32, 32)
    assert record_of(account).cached == Known(16)


def test_prompt_list_is_summed_as_admitted() -> None:
    """Prompt, cached, written and completion tokens are summed over all prompts admitted so far."""
    account = account_of(40, 20, 8)
    admit(account, 1, 1, 16, 16)
    admit(account, 2, 1, 0, 0)
    assert (account.prompt_tokens, account.cached) == (Known(60), Known(16))
    admit(account, 3, 1, 4, 4)
    write(account, 1, 16, 32)
    write(account, 2, 0, 16)
    for sequence_id, start, end in ((1, 16, 40), (2, 0, 20), (3, 4, 8)):
        compute(account, sequence_id, (start, end))
    finish(account, 1, 2, 3, num_tokens=2)
    record = record_of(account)
    assert account.problems() == []
    assert (record.prompt, record.cached, record.cache_write) == (Known(68), Known(20), Known(32))
    assert record.completion_tokens == 6


# ---------------------------------------------------------------- written tokens


def test_written_tokens_count_once() -> None:
    """Blocks committed again after a preemption, or granted as cached, are not counted as written."""
    account = account_of(40)
    admit(account, 1, 1, 16, 16)
    write(account, 1, 0, 24)
    write(account, 1, 16, 32)
    assert account.cache_write == Known(16)


def test_written_tokens_are_frozen_at_first_token() -> None:
    """Later writes, by the first choice or its siblings, are not charged to the client."""
    account = account_of(40, num_choices=2)
    admit(account, 1, 1, 0, 0)
    write(account, 1, 0, 16)
    first_token(account, 2)
    write(account, 1, 16, 32)
    first_token(account, 1)
    write(account, 1, 32, 40)
    assert account.cache_write == Known(32)


# ---------------------------------------------------------------- outcomes


def test_error_sets_the_outcome() -> None:
    """An internal error is a failure; an invalid request or overload is a rejection, unless it was admitted."""
    for kind, outcome in (
        (ErrorKind.INTERNAL, Outcome.FAILED),
        (ErrorKind.INVALID, Outcome.REJECTED),
        (ErrorKind.OVERLOADED, Outcome.REJECTED),
    ):
        account = account_of(8)
        account.error = RequestError(kind, "why")
        assert account.outcome is outcome
        admit(account, 1, 1, 0, 0)
        assert account.outcome is Outcome.FAILED


def test_withdrawn_request_counts_as_never_admitted() -> None:
    """If the journal has no room for a request, its numbers are unknown."""
    account = account_of(8)
    admit(account, 1, 1, 0, 0)
    first_token(account, 1)
    account.withdraw()
    account.error = RequestError(ErrorKind.OVERLOADED, "no room")
    record = record_of(account)
    assert (record.prompt, record.cached, record.cache_write) == (UNKNOWN, UNKNOWN, UNKNOWN)
    assert record.outcome is Outcome.REJECTED
    assert record.admitted_at is record.first_token_at is record.incarnation is None


def test_request_without_sequences() -> None:
    """Nothing is known about a request that was not tokenized."""
    record = record_of(new_account())
    assert (record.outcome, record.num_choices, record.prompt) == (Outcome.CANCELLED, 0, UNKNOWN)
