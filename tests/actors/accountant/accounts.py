"""Helpers that make, feed and end accounts in one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quipu.actors.accountant.account import Account
from quipu.actors.accountant.account_entries import Admission, Ended, FirstToken, Span, Written
from quipu.actors.messages.accountant import Completed, OpenAccount, Side
from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.request_desk.mailbox import Mailbox

MISS = CacheMiss(MissReason.NONE, 0)


def new_account() -> Account:
    return Account(OpenAccount("r", "test", 10.0, Mailbox()), 1_000_010.0)


def account_of(*prompts: int, num_choices: int = 1) -> Account:
    """Make one request with `num_choices` sequences per prompt, numbered from 1, prompt by prompt."""
    account = new_account()
    sequence_id = 1
    for prompt_index, num_tokens in enumerate(prompts):
        for choice in range(num_choices):
            account.add_sequence(sequence_id, prompt_index, choice, num_tokens)
            sequence_id += 1
    return account


def admission(
    number: int,
    reused: int | None,
    read: int,
    *,
    tiers: Mapping[str, int] | None = None,
    side: Side = Side.PREFILL,
    copyable: int = 0,
    copied: int = 0,
    tier_spans: Mapping[str, Sequence[int]] | None = None,
) -> Admission:
    return Admission(
        number=number,
        reused=reused,
        read=read,
        tiers=tiers,
        side=side,
        copyable=copyable,
        copied=copied,
        tier_spans={tier: list(spans) for tier, spans in (tier_spans or {}).items()},
        miss=MISS,
        incarnation=1,
        at=11.0,
    )


def admit(account: Account, sequence_id: int, number: int, reused: int, read: int) -> None:
    account.apply(sequence_id, admission(number, reused, read))


def compute(account: Account, sequence_id: int, *spans: tuple[int, int]) -> None:
    for start, end in spans:
        account.apply(sequence_id, Span(start, end))


def write(account: Account, sequence_id: int, start: int, end: int) -> None:
    account.apply(sequence_id, Written(start, end))


def first_token(account: Account, sequence_id: int, at: float = 12.0) -> None:
    account.apply(sequence_id, FirstToken(at))


def finish(account: Account, *sequence_ids: int, num_tokens: int = 1) -> None:
    for sequence_id in sequence_ids:
        account.apply(sequence_id, Ended())
        account.complete(Completed("", sequence_id, num_tokens, FinishReason.LENGTH))
