"""Accounts of requests with many prompts, whose parts are kept, against the same accounts in one piece."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from quipu.actors.accountant.account import Account
from quipu.actors.accountant.account_entries import (
    Ended,
    EngineLost,
    Entry,
    Estimation,
    FirstToken,
    Gap,
    Pinned,
    Revision,
    Written,
)
from quipu.actors.accountant.closing_explanations import ClosingExplanations
from quipu.actors.accountant.divided_account import PART_SEQUENCES, DividedAccount
from quipu.actors.accountant.entry_store import EntryStore
from quipu.actors.accountant.request_entries import RequestEntries
from quipu.actors.messages.accountant import Completed, OpenAccount, Prompted
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.prompts import Breakpoint, CacheTtl
from quipu.actors.request_desk.mailbox import Mailbox
from tests.actors.accountant.accounts import admission

NUM_PROMPTS, PROMPT = 2 * PART_SEQUENCES + 9, 24


def new_request(num_prompts: int, num_choices: int, store: EntryStore | None = None) -> RequestEntries:
    places = [(prompt, choice) for prompt in range(num_prompts) for choice in range(num_choices)]
    marks = (Breakpoint(8, CacheTtl.ONE_HOUR), Breakpoint(16, CacheTtl.FIVE_MINUTES))
    store = store or EntryStore()
    store.open(OpenAccount("r", "test", 10.0, Mailbox()), 1_000_010.0)
    store.add_prompts(
        Prompted(
            "r",
            tuple(range(1, len(places) + 1)),
            tuple(prompt for prompt, _ in places),
            tuple(choice for _, choice in places),
            (PROMPT,) * len(places),
            (marks,) * len(places),
        )
    )
    return store.requests["r"]


def in_one_piece(request: RequestEntries) -> Account:
    """Make the account of a request from its entries alone."""
    account, prompted = Account(request.opened, request.opened_unix_s), request.prompted
    assert prompted is not None
    account.error = request.error
    request.applied.keep_first_admission(account)
    columns = (prompted.prompt_indexes, prompted.choice_indexes, prompted.num_prompt_tokens, prompted.breakpoints)
    for sequence_id, *column in zip(prompted.sequence_ids, *columns, strict=True):
        account.add_sequence(sequence_id, *column)
    choices = dict(zip(prompted.sequence_ids, prompted.choice_indexes, strict=True))
    for sequence_id in sorted(request.entries, key=lambda i: choices[i] == 0):
        for entry in request.entries[sequence_id]:
            account.apply(sequence_id, entry)
    for sequence_id, drafted in request.drafted.items():
        account.sequences[sequence_id].drafted = drafted
    for completed in request.completed.values():
        account.complete(completed)
    if request.applied.is_withdrawn:
        account.withdraw()
    return account


def state_of(account: Account) -> object:
    """Return everything that is read of an account."""
    return (
        account.record(20.0),
        sorted(account.problems()),
        account.told_by_prompt(),
        account.num_frozen_prompts,
        [account.created(ttl) for ttl in CacheTtl],
        list(account.sequences),
        list(account.prompts),
    )


def entry_of(rng: random.Random) -> Entry:
    """Draw an entry, most of which agree with each other."""
    read = rng.choice((0, 8, 16, 16))
    tiers = rng.choice((None, {"device": read}, {"host": read}, {"peer": read}))
    return rng.choice(
        (
            admission(rng.choice((1, 1, 2)), rng.choice((read, read, None)), read, tiers=tiers),
            Written(read, PROMPT),
            Pinned(read),
            Estimation(read),
            Revision("host", rng.choice((0, 8))),
            FirstToken(rng.choice((9.0, 12.0, 13.0))),
            EngineLost(rng.choice((1, 2))),
            Ended(),
            Gap(),
        )
    )


@pytest.mark.parametrize("seed", range(12))
def test_same_as_in_one_piece(seed: int) -> None:
    """However entries come and whenever it is read, a divided account has the numbers of one in one piece."""
    rng = random.Random(seed)
    num_choices = rng.choice((1, 1, 2, 5))
    request = new_request(NUM_PROMPTS // num_choices, num_choices)
    ids = list(request.entries)
    for at in range(300):
        sequence_id = rng.choice(ids)
        what = rng.randrange(8)
        if what == 0:
            start = rng.choice((0, 8, 16))
            request.add_span(sequence_id, start, start + 8)
        elif what == 1:
            request.add_draft(sequence_id, 30, 31, 33, is_predicted=rng.random() < 0.5)
        elif what == 2:
            request.complete(Completed("r", sequence_id, 3, FinishReason.LENGTH, 1))
        else:
            request.add(sequence_id, entry_of(rng))
        if at == 250 and seed % 4 == 0:
            request.applied.is_withdrawn = True
            request.account().withdraw()
        if rng.random() < 0.2:
            account = request.account()
            assert isinstance(account, DividedAccount)
            assert state_of(account) == state_of(in_one_piece(request))
            if account.admitted_at is not None and request.applied.admitted_at is None:
                request.applied.note_first_admission(account)
    for sequence_id in ids:
        request.complete(Completed("r", sequence_id, 3, FinishReason.LENGTH, 1))
    assert state_of(request.account()) == state_of(in_one_piece(request))
    assert request.account().record(20.0).finish_reason is FinishReason.LENGTH


def test_only_what_has_changed_is_made_anew() -> None:
    """After an entry, the parts of all other prompts are those of the account before."""
    request = new_request(NUM_PROMPTS, 1)
    for sequence_id in request.entries:
        request.add(sequence_id, admission(1, 0, 0))
    before = request.account()
    request.applied.note_first_admission(before)
    before = request.account()
    request.add_span(1, 0, PROMPT)
    after = request.account()
    kept = [i for i, sequence in after.sequences.items() if sequence is before.sequences[i]]
    assert kept == list(request.entries)[PART_SEQUENCES:]


def test_withdrawn_after_it_was_explained() -> None:
    """What was prepared of an account is not kept if the journal then has no room for it."""
    store, desk = EntryStore(), mock.Mock(num_usable_blocks_of=lambda engine_id: 100)
    request = new_request(NUM_PROMPTS, 1, store)
    for sequence_id in request.entries:
        request.add(sequence_id, admission(1, 8, 8))
        request.add(sequence_id, Ended())
        request.complete(Completed("r", sequence_id, 3, FinishReason.LENGTH, 1))
    explanations = ClosingExplanations(store, desk, mock.Mock())
    assert sum(1 for _ in explanations.prepare(request)) == NUM_PROMPTS
    account = request.account()
    request.applied.is_withdrawn = True
    account.withdraw()
    explanations.keep(request, account, account.record(20.0))
    explained = store.explanations.prompt("r", 0)
    assert explained is not None and explained.cached_tokens is None
