"""Random entries against an oracle that keeps one state per position."""

from __future__ import annotations

from itertools import pairwise

import attrs
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.accountant.account import Account
from quipu.actors.accountant.account_entries import Admission, Ended, Entry, FirstToken, Revision, Span, Written
from quipu.actors.accountant.entry_store import EntryStore
from quipu.actors.accountant.request_entries import RequestEntries
from quipu.actors.accountant.sequence_account import SequenceAccount
from quipu.actors.messages.accountant import Completed, OpenAccount, Prompted
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.request_desk.mailbox import Mailbox
from tests.actors.accountant.accounts import admission

PROMPT, MOST = 24, 40
"""Number of prompt tokens, and of all positions."""


@st.composite
def span(draw: st.DrawFn) -> Span:
    start = draw(st.integers(0, MOST))
    return Span(start, draw(st.integers(start, MOST)))


@st.composite
def admission_entries(draw: st.DrawFn) -> Admission:
    """Generate admissions with small numbers, whose entries mostly agree."""
    number = draw(st.integers(1, 4))
    read = draw(st.integers(0, MOST))
    reused = draw(st.one_of(st.just(read), st.integers(0, MOST)))
    copied = draw(st.one_of(st.just(0), st.integers(0, MOST - read)))
    copyable = draw(st.one_of(st.just(copied), st.integers(0, MOST)))
    return admission(number, reused, read, copyable=copyable, copied=copied)


@attrs.define
class Oracle:
    """Records how each position was first covered, and how often positions were covered again."""

    first: dict[int, str] = attrs.field(factory=dict)
    num_recomputed: int = 0
    last_number: int = 0
    problems: int = 0

    def book(self, entry: Entry) -> None:
        match entry:
            case Span():
                self.cover(range(entry.start, entry.end), "computed")
            case Admission():
                if entry.number <= self.last_number:
                    return
                self.problems += entry.number != self.last_number + 1
                self.problems += entry.reused != entry.read
                self.problems += entry.copied > entry.copyable
                self.cover(range(entry.read), "read" if self.last_number == 0 else "restored")
                self.cover(range(entry.read, entry.read + entry.copied), "restored")
                self.last_number = entry.number

    def cover(self, positions: range, how: str) -> None:
        for position in positions:
            if position in self.first:
                self.num_recomputed += 1
            else:
                self.first[position] = how

    def count(self, how: str) -> int:
        """Count first coverages; those of outputs do not count, unless the first admission read them."""
        end = MOST if how == "read" else PROMPT
        return sum(word == how for position, word in self.first.items() if position < end)


def sequence_of(account: Account) -> SequenceAccount:
    return account.sequences[1]


@given(st.lists(st.one_of(span(), admission_entries()), max_size=14), st.booleans())
def test_first_coverage_and_recomputation(entries: list[Entry], finished: bool) -> None:
    """Read, computed, restored and recomputed positions, and disputes, are those of the oracle."""
    oracle = Oracle()
    account = new_request().account()
    for entry in entries:
        account.apply(1, entry)
        oracle.book(entry)
    if finished:
        account.complete(Completed("", 1, 3, FinishReason.LENGTH))
    sequence = sequence_of(account)
    counted = [sequence.read, sequence.computed_first, sequence.restored_first, sequence.recomputed]
    assert counted == [*map(oracle.count, ("read", "computed", "restored")), oracle.num_recomputed]
    covered = sum(counted[:3])
    keeps_books = sequence.counts_reuse or sequence.has_spans
    unbalanced = keeps_books and (covered != PROMPT if finished else covered > PROMPT)
    assert len(sequence.problems()) == oracle.problems + unbalanced


def new_request() -> RequestEntries:
    """Make the entries of a request with one sequence of PROMPT tokens, numbered 1."""
    store = EntryStore()
    store.open(OpenAccount("r", "test", 10.0, Mailbox()), 1_000_010.0)
    store.add_prompts(Prompted("r", (1,), (0,), (0,), (PROMPT,)))
    return store.requests["r"]


def state_of(account: Account) -> object:
    """Return everything observable about an account."""
    sequence = sequence_of(account)
    return (
        account.record(20.0),
        account.problems(),
        sequence.covered.intervals,
        sequence.admissions,
        account.prompts[0].cache_write_tokens,
        account.first_token_at,
    )


PIECES = st.one_of(
    st.tuples(span(), st.lists(st.integers(0, MOST), max_size=3)),  # and where each span is cut
    admission_entries(),
    st.builds(Written, st.integers(0, PROMPT), st.integers(0, PROMPT)),
    st.just(FirstToken(12.0)),
    st.builds(Revision, st.just("device"), st.integers(0, 8)),
)


@given(st.lists(PIECES, max_size=14), st.booleans())
def test_merged_spans_make_the_same_account(pieces: list[object], ends: bool) -> None:
    """Merging consecutive spans does not change the account, however the spans were cut."""
    request, account = new_request(), new_request().account()
    for piece in pieces:
        if isinstance(piece, tuple):
            whole, cuts = piece
            edges = sorted({whole.start, whole.end, *(cut for cut in cuts if whole.start < cut < whole.end)})
            for low, high in pairwise(edges) if len(edges) > 1 else [(whole.start, whole.end)]:
                request.add_span(1, low, high)
            account.apply(1, attrs.evolve(whole))
        else:
            request.add(1, piece)
            account.apply(1, piece)
    if ends:
        request.add(1, Ended())
        account.apply(1, Ended())
    assert state_of(request.account()) == state_of(account)
    assert state_of(request.account()) == state_of(account), "reading an account must not change it"


def test_spans_are_merged() -> None:
    """A thousand decode steps are one entry, so that the cost of an account does not grow with every token."""
    request = new_request()
    request.add(1, admission(1, 0, 0))
    for position in range(1000):
        request.add_span(1, position, position + 1)
    assert len(request.entries[1]) == 2
