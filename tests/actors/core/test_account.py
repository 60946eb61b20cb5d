"""The books of one request: what balances, what is disputed, and what its client is told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.core.account import Account, Coverage
from quipu.actors.messages import ErrorKind, FinishReason, Outcome, RequestError


def account_of(*prompts: int, num_choices: int = 1) -> Account:
    """One request of `num_choices` sequences a prompt; sequences are numbered from 1, prompt by prompt."""
    account = Account("r", "test", 0.0)
    sequence_id = 1
    for prompt_index, num_tokens in enumerate(prompts):
        for choice in range(num_choices):
            account.prompted(sequence_id, prompt_index, choice, num_tokens)
            sequence_id += 1
    return account


def finish(account: Account, *sequence_ids: int, num_tokens: int = 1) -> None:
    for sequence_id in sequence_ids:
        book = account.books[sequence_id]
        book.finish_reason, book.num_completion_tokens = FinishReason.LENGTH, num_tokens
        book.terminal = book.completed = True


# ---------------------------------------------------------------- coverage


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_coverage_counts_each_position_once(spans: list[tuple[int, int]]) -> None:
    """Whatever spans are added in whatever order, it is a set of positions in disjoint ascending intervals."""
    coverage, positions = Coverage(), set[int]()
    for start, end in spans:
        new = set(range(start, end)) - positions
        assert coverage.add(start, end) == len(new)
        positions |= new
        assert coverage.total == len(positions)
        flat = [edge for interval in coverage.intervals for edge in interval]
        assert flat == sorted(set(flat)), "intervals touch, overlap or are empty"
        assert {p for low, high in coverage.intervals for p in range(low, high)} == positions


# ---------------------------------------------------------------- what balances


def test_a_hit_and_its_rest_balance() -> None:
    """16 of 40 tokens are read, 24 computed in two chunks, outputs are not the prompt's."""
    account = account_of(40)
    account.admit(1, 1, 16, 16)
    for start, end in ((16, 32), (32, 40), (40, 41), (41, 42)):
        account.books[1].compute(start, end)
    account.write(1, 16, 32)
    finish(account, 1, num_tokens=3)
    record = account.record()
    assert account.problems() == []
    assert record.outcome is Outcome.FINISHED
    assert (record.prompt_tokens, record.cached_tokens, record.cache_write_tokens) == (40, 16, 16)
    assert (record.computed_tokens, record.restored_tokens, record.recomputed_tokens) == (24, 0, 0)
    assert record.completion_tokens == 3
    assert record.cached_by_tier == {"device": 16, "host": 0, "disk": 0, "remote": 0, "unattributed": 0}
    assert not record.disputed


def test_zero_is_known_and_no_admission_is_unknown() -> None:
    """A miss reports 0 cached tokens; a request that was never admitted reports none."""
    missed, waiting = account_of(8), account_of(8)
    missed.admit(1, 1, 0, 0)
    assert missed.record().cached_tokens == 0
    record = waiting.record()
    assert (record.prompt_tokens, record.cached_tokens, record.cached_by_tier) == (None, None, None)
    assert record.cache_write_tokens is None
    assert not record.disputed


def test_preemption_changes_nothing_that_the_client_sees() -> None:
    """Readmitted, it reads what somebody else published meanwhile: restored, not cached; the rest is recomputed."""
    account = account_of(40)
    account.admit(1, 1, 16, 16)
    account.books[1].compute(16, 24)
    account.admit(1, 2, 32, 32)
    account.books[1].compute(32, 40)
    finish(account, 1)
    book = account.books[1]
    assert account.problems() == []
    assert account.num_cached_tokens == 16
    assert (book.read, book.computed_first, book.restored_first, book.recomputed) == (16, 16, 8, 24)


def test_readmission_that_finds_nothing_recomputes() -> None:
    """Positions covered again are recomputed, outputs included, and the frozen count stays."""
    account = account_of(20)
    account.admit(1, 1, 16, 16)
    for start, end in ((16, 20), (20, 21)):
        account.books[1].compute(start, end)
    account.admit(1, 2, 0, 0)
    account.books[1].compute(0, 22)
    finish(account, 1, num_tokens=3)
    book = account.books[1]
    assert account.problems() == []
    assert account.num_cached_tokens == 16
    assert (book.read, book.computed_first, book.restored_first, book.recomputed) == (16, 4, 0, 21)


def test_an_entry_that_is_heard_twice_counts_once() -> None:
    """A replayed admission or span adds nothing but recomputed positions."""
    account = account_of(20)
    for _ in range(2):
        account.admit(1, 1, 16, 16)
        account.books[1].compute(16, 20)
    finish(account, 1)
    book = account.books[1]
    assert account.problems() == []
    assert (book.num_admissions, book.read, book.computed_first, book.recomputed) == (1, 16, 4, 4)


def test_a_request_that_was_cut_short_balances_with_less() -> None:
    """Half a prompt is no dispute where the client left."""
    account = account_of(40)
    account.admit(1, 1, 16, 16)
    account.books[1].compute(16, 24)
    account.leaving = True
    assert account.problems() == []
    assert account.outcome is Outcome.CANCELLED


# ---------------------------------------------------------------- what is disputed


def test_the_executor_confirms_less_than_was_granted() -> None:
    """A stale grant: nobody covers the difference, and the client is told what it was told."""
    account = account_of(40)
    account.admit(1, 1, 32, 16)
    account.books[1].compute(32, 40)
    finish(account, 1)
    assert account.problems() == [
        "sequence 1: admission 1: reused 32, read 16",
        "sequence 1: prompt 40, read 16, computed 8, restored 0",
    ]
    assert account.record().disputed
    assert account.record().cached_tokens == 32


def test_the_executor_claims_more_than_was_granted() -> None:
    """Also where the sum comes out even."""
    account = account_of(40)
    account.admit(1, 1, 16, 32)
    account.books[1].compute(16, 40)
    finish(account, 1)
    assert account.problems() == ["sequence 1: admission 1: reused 16, read 32"]


def test_a_span_that_is_lost_is_missed() -> None:
    """A prompt position that nobody covered disputes a finished request."""
    account = account_of(40)
    account.admit(1, 1, 0, 0)
    account.books[1].compute(0, 16)
    account.books[1].compute(24, 40)
    finish(account, 1)
    assert account.problems() == ["sequence 1: prompt 40, read 0, computed 32, restored 0"]


def test_covering_more_than_the_prompt_is_never_clamped() -> None:
    """A read past the prompt's end disputes even a request that was cut short."""
    account = account_of(8)
    account.admit(1, 1, 16, 16)
    assert account.problems() == ["sequence 1: prompt 8, read 16, computed 0, restored 0"]
    assert account.num_cached_tokens == 16


def test_an_admission_that_was_never_heard_is_missed() -> None:
    """The second without the first: the numbers do not follow."""
    account = account_of(8)
    account.admit(1, 2, 0, 0)
    account.books[1].compute(0, 8)
    finish(account, 1)
    assert account.problems() == ["sequence 1: admission 2 follows 0"]


def test_a_mismatch_at_a_readmission_is_disputed_too() -> None:
    """Restored tokens have two entries like all others."""
    account = account_of(40)
    account.admit(1, 1, 0, 0)
    account.books[1].compute(0, 40)
    account.admit(1, 2, 32, 16)
    finish(account, 1)
    assert account.problems() == ["sequence 1: admission 2: reused 32, read 16"]


# ---------------------------------------------------------------- choices and lists


def test_choices_count_their_prompt_once() -> None:
    """Cached is what the first choice was granted, whoever ends last; the others' hits are their own."""
    account = account_of(40, num_choices=3)
    assert account.admit(1, 1, 0, 0) is account.prompts[0]
    account.books[1].compute(0, 40)
    for sequence_id in (2, 3):
        assert account.admit(sequence_id, 1, 32, 32) is None
        account.books[sequence_id].compute(32, 40)
    account.write(1, 0, 32)
    finish(account, 3, 2, 1, num_tokens=5)
    record = account.record()
    assert account.problems() == []
    assert (record.prompt_tokens, record.cached_tokens, record.cache_write_tokens) == (40, 0, 32)
    assert record.completion_tokens == 15


def test_a_later_choice_decides_nothing() -> None:
    """Until the first choice is admitted the prompt's numbers are unknown, and a readmission does not decide them."""
    account = account_of(40, num_choices=2)
    assert account.admit(2, 1, 32, 32) is None
    assert account.record().cached_tokens is None
    assert account.admit(1, 1, 16, 16) is account.prompts[0]
    assert account.admit(1, 2, 32, 32) is None
    assert account.record().cached_tokens == 16


def test_a_list_of_prompts_is_summed() -> None:
    """Prompt, cached, written and completion tokens over all prompts; running sums over those admitted so far."""
    account = account_of(40, 20, 8)
    account.admit(1, 1, 16, 16)
    account.admit(2, 1, 0, 0)
    assert (account.num_prompt_tokens, account.num_cached_tokens) == (60, 16)
    account.admit(3, 1, 4, 4)
    account.write(1, 16, 32)
    account.write(2, 0, 16)
    for sequence_id, start, end in ((1, 16, 40), (2, 0, 20), (3, 4, 8)):
        account.books[sequence_id].compute(start, end)
    finish(account, 1, 2, 3, num_tokens=2)
    record = account.record()
    assert account.problems() == []
    assert (record.prompt_tokens, record.cached_tokens, record.cache_write_tokens) == (68, 20, 32)
    assert record.completion_tokens == 6


# ---------------------------------------------------------------- written tokens


def test_a_write_counts_once_and_never_what_was_cached() -> None:
    """After a preemption the same blocks may be committed again; a block granted as cached is no write."""
    account = account_of(40)
    account.admit(1, 1, 16, 16)
    account.write(1, 0, 24)
    account.write(1, 16, 32)
    assert account.num_written_tokens == 16


def test_what_was_written_is_frozen_with_the_first_choices_first_token() -> None:
    """Later writes, by it or by its siblings, are not the client's."""
    account = account_of(40, num_choices=2)
    account.admit(1, 1, 0, 0)
    account.write(1, 0, 16)
    assert not account.first_token(2)
    account.write(1, 16, 32)
    assert account.first_token(1)
    assert not account.first_token(1)
    account.write(1, 32, 40)
    assert account.num_written_tokens == 32


# ---------------------------------------------------------------- closing


def test_an_account_waits_for_terminal_and_completion_of_every_sequence() -> None:
    """One of the two is not enough, nor one of the sequences."""
    account = account_of(8, num_choices=2)
    finish(account, 1)
    assert not account.may_close
    account.books[2].terminal = True
    assert not account.may_close
    account.books[2].completed = True
    assert account.may_close


def test_an_account_does_not_wait_for_what_no_engine_was_given() -> None:
    """Its client left before the second sequence was submitted."""
    account = account_of(8, num_choices=2)
    account.leaving = True
    account.wait_only_for((1,))
    assert not account.may_close
    finish(account, 1)
    assert account.may_close


def test_an_account_without_sequences_closes_by_its_end_only() -> None:
    """Not yet tokenised it stays open; refused or left it closes."""
    account = Account("r", "test", 0.0)
    assert not account.may_close
    account.leaving = True
    assert account.may_close
    assert account.outcome is Outcome.CANCELLED


def test_an_error_decides_the_outcome() -> None:
    """Ours is a failure; the client's, or too much load, a rejection."""
    for kind, outcome in (
        (ErrorKind.INTERNAL, Outcome.FAILED),
        (ErrorKind.INVALID, Outcome.REJECTED),
        (ErrorKind.OVERLOADED, Outcome.REJECTED),
    ):
        account = account_of(8)
        account.error = RequestError(kind, "why")
        assert account.outcome is outcome
