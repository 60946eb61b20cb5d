"""Entries of a request's choices, in the order in which they came."""

from __future__ import annotations

import pytest

from quipu.actors.accountant.account_entries import Ended, FirstToken, Written
from quipu.actors.accountant.entry_store import EntryStore
from quipu.actors.accountant.request_entries import RequestEntries
from quipu.actors.messages.accountant import OpenAccount, Prompted
from quipu.actors.request_desk.mailbox import Mailbox
from tests.actors.accountant.accounts import admission


def two_choices() -> RequestEntries:
    """Make a request of 14 tokens with two choices, numbered 1 and 2, both admitted."""
    store = EntryStore()
    store.open(OpenAccount("r", "test", 10.0, Mailbox()), 1_000_010.0)
    store.add_prompts(Prompted("r", (1, 2), (0, 0), (0, 1), (14, 14)))
    for sequence_id in (1, 2):
        store.requests["r"].add(sequence_id, admission(1, 0, 0))
    return store.requests["r"]


@pytest.mark.parametrize("writer", [1, 2])
def test_what_any_choice_has_written_before_the_first_token_counts(writer: int) -> None:
    """Tokens that a second choice wrote count like those of the first, also in accounts that are made later."""
    request = two_choices()
    request.add(writer, Written(0, 12))
    assert request.account().record(12.0).cache_write_tokens == 12
    request.add(1, FirstToken(12.0))
    assert request.account().record(13.0).cache_write_tokens == 12


@pytest.mark.parametrize("writer", [1, 2])
def test_what_is_written_after_the_first_token_does_not_count(writer: int) -> None:
    """What a client is told at its first token is final, whichever choice writes more."""
    request = two_choices()
    request.add(1, Written(0, 8))
    request.add(1, FirstToken(12.0))
    request.add(writer, Written(8, 12))
    assert request.account().record(13.0).cache_write_tokens == 8


def test_first_token_is_not_before_its_admission() -> None:
    """If another choice is ahead of the first one, the first token counts from the admission."""
    store = EntryStore()
    store.open(OpenAccount("r", "test", 10.0, Mailbox()), 1_000_010.0)
    store.add_prompts(Prompted("r", (1, 2), (0, 0), (0, 1), (14, 14)))
    request = store.requests["r"]
    request.add(2, admission(1, 0, 0))
    request.add(2, FirstToken(10.5))
    assert request.account().admitted_at is None
    request.add(1, admission(1, 0, 0))
    account = request.account()
    assert account.admitted_at == account.first_token_at == 11.0


def test_end_without_a_token_may_make_effects_due() -> None:
    """What was granted from a lower tier settles with its prompt's first token, or with its end."""
    request = two_choices()
    num_changes = request.num_changes
    request.add(2, Ended())
    assert request.num_changes == num_changes  # another choice settles nothing
    request.add(1, Ended())
    assert request.num_changes == num_changes + 1
    begun = two_choices()
    begun.add(1, FirstToken(12.0))
    num_changes = begun.num_changes
    begun.add(1, Ended())
    assert begun.num_changes == num_changes
