"""The account of a request that one engine begins and another continues: what is moved, restored, computed again."""

from __future__ import annotations

import attrs
import pytest

from quipu.actors.accountant.account import Account
from quipu.actors.accountant.account_entries import Admission, EngineLost, HandedOver
from quipu.actors.messages.accountant import Side
from quipu.actors.messages.counts import UNKNOWN, Known
from quipu.actors.messages.usage_record import UsageRecord
from tests.actors.accountant.accounts import account_of, admission, compute, finish, first_token

P, D, D2 = (0, 1), (1, 2), (2, 3)
"""Engines: the id of each, and the incarnation."""
NOTHING: dict[str, int] = {"device": 0}


def on(engine: tuple[int, int], admitted: Admission) -> Admission:
    engine_id, incarnation = engine
    return attrs.evolve(admitted, engine_id=engine_id, incarnation=incarnation)


def found(number: int, device: int, *moved: int, side: Side = Side.DECODE) -> Admission:
    """Make an admission that found `device` tokens of its own engine's cache, and others' at `moved`: start, end, …"""
    peer = sum(moved[1::2]) - sum(moved[::2])
    tiers = {"device": device, "peer": peer}
    return admission(number, device + peer, device + peer, tiers=tiers, tier_spans={"peer": moved}, side=side)


def prefilled(prompt: int = 70, *, cached: int = 0, num_choices: int = 1) -> Account:
    """Make an account of one prompt, each of whose choices P has prefilled and left to another engine."""
    account = account_of(prompt, num_choices=num_choices)
    for sequence_id in range(1, num_choices + 1):
        account.apply(sequence_id, on(P, found(1, cached, side=Side.PREFILL)))
        compute(account, sequence_id, (cached, prompt))
        first_token(account, sequence_id)
        account.apply(sequence_id, HandedOver())
    return account


def ended(account: Account, num_tokens: int = 3) -> UsageRecord:
    """Finish every sequence, and return the record of an account that adds up."""
    finish(account, *account.sequences, num_tokens=num_tokens)
    assert account.problems() == []
    return account.record(20.0)


def work(record: UsageRecord) -> tuple[int, int, int, int]:
    """Return what was computed, restored, computed again and moved."""
    return (record.computed_tokens, record.restored_tokens, record.recomputed_tokens, record.moved_tokens)


@pytest.mark.parametrize("cached", [0, 32])
def test_pair(cached: int) -> None:
    """Cold or warm, the client hears of P's cache; D is given 64 tokens and computes the 6 that fill no block again."""
    account = prefilled(cached=cached)
    account.apply(1, on(D, found(1, 0, 0, 64)))
    compute(account, 1, (64, 72))
    record = ended(account)
    assert (record.cached, record.cached_by_tier) == (Known(cached), dict(account.prompts[0].by_tier))
    assert work(record) == (70 - cached, 0, 6, 64)
    assert (record.engine, record.incarnation) == P
    assert (record.decode_engine, record.decode_incarnation) == D
    assert account.moved == {1: 64}


def test_what_the_decode_side_has_is_nothing() -> None:
    """Blocks that D has in its own cache are neither moved nor computed again, nor a hit."""
    account = prefilled()
    account.apply(1, on(D, found(1, 48, 48, 64)))
    compute(account, 1, (64, 72))
    assert work(ended(account)) == (70, 0, 6, 16)
    assert account.cached == Known(0)


def test_copied_from_a_block_of_the_decode_side() -> None:
    """Neither is what D copies from a block of its own."""
    account = prefilled()
    account.apply(1, attrs.evolve(on(D, found(1, 0, 0, 64)), copyable=15, copied=5))
    compute(account, 1, (69, 72))
    assert work(ended(account)) == (70, 0, 1, 64)


def test_first_engine_did_everything() -> None:
    """Without another engine nothing is moved, and the record names only the one, which may have preempted it."""
    account = account_of(70)
    account.apply(1, on(P, found(1, 32, side=Side.PREFILL)))
    compute(account, 1, (32, 72))
    first_token(account, 1)
    account.apply(1, on(P, found(2, 64, side=Side.PREFILL)))
    compute(account, 1, (64, 75))
    record = ended(account)
    assert work(record) == (38, 0, 72, 0)
    assert (record.decode_engine, record.decode_incarnation) == (None, None)


def test_cut_transfer() -> None:
    """Of a transfer that breaks off, what came is moved, and the rest is computed again."""
    account = prefilled()
    account.apply(1, on(D, found(1, 0, 0, 32)))
    compute(account, 1, (32, 72))
    assert work(ended(account)) == (70, 0, 38, 32)


def test_preempted_on_the_decode_side() -> None:
    """A preemption there is like any other: what is read or computed again is recomputed, nothing is moved twice."""
    account = prefilled()
    account.apply(1, on(D, found(1, 0, 0, 64)))
    compute(account, 1, (64, 72))
    account.apply(1, on(D, found(2, 48)))
    compute(account, 1, (48, 75))
    assert work(ended(account)) == (70, 0, 6 + 48 + 24, 64)


def test_unheard_blocks_of_another_engine_are_restored() -> None:
    """Positions that nobody is known to have covered are restored where they are found, moved or not."""
    account = account_of(70)
    account.apply(1, on(P, found(1, 0, side=Side.PREFILL)))
    compute(account, 1, (0, 16))
    account.apply(1, HandedOver())
    account.apply(1, on(D, found(1, 16, 16, 48)))
    compute(account, 1, (48, 72))
    first_token(account, 1)
    assert work(ended(account)) == (16 + 22, 32, 0, 32)
    assert account.cached == Known(0)


@pytest.mark.parametrize("device", [0, 32])
def test_first_engine_died_unheard(device: int) -> None:
    """The next engine's admission is the first: its own cache is a hit, what it fetched from the dead one is not."""
    account = account_of(70)
    account.apply(1, EngineLost(1))
    account.apply(1, on(D, found(1, device, device, 64, side=Side.PREFILL)))
    assert account.cached == Known(device), "it is told at once"
    compute(account, 1, (64, 72))
    first_token(account, 1)
    record = ended(account)
    assert record.cached_by_tier == {"device": device, "host": 0, "disk": 0, "remote": 0, "unattributed": 0}
    assert work(record) == (6, 64 - device, 0, 64 - device)
    assert (record.engine, record.decode_engine, record.num_engine_deaths) == (1, None, 1)


def test_first_engine_died_heard() -> None:
    """After the first report its numbers stand; D is given what it had fetched by then, and computes the rest again."""
    account = account_of(70)
    account.apply(1, on(P, found(1, 16, side=Side.PREFILL)))
    compute(account, 1, (16, 70))
    first_token(account, 1)
    account.apply(1, EngineLost(1))
    account.apply(1, on(D, found(1, 0, 0, 48, side=Side.PREFILL)))
    compute(account, 1, (48, 72))
    record = ended(account)
    assert record.cached == Known(16)
    assert work(record) == (54, 0, 22, 48)
    assert (record.engine, record.decode_engine, record.num_engine_deaths) == (0, 1, 1)


@pytest.mark.parametrize("is_heard", [False, True])
def test_decode_side_died(is_heard: bool) -> None:
    """D's successor is given the blocks once more; what D has done counts if it was heard of."""
    account = prefilled()
    if is_heard:
        account.apply(1, on(D, found(1, 0, 0, 64)))
        compute(account, 1, (64, 72))
    account.apply(1, EngineLost(2))
    account.apply(1, on(D2, found(1, 0, 0, 64)))
    compute(account, 1, (64, 75))
    record = ended(account)
    assert work(record) == (70, 0, 6 + (8 if is_heard else 0), 128 if is_heard else 64)
    assert account.moved == ({1: 64, 2: 64} if is_heard else {2: 64})
    assert (record.cached, record.decode_engine, record.decode_incarnation) == (Known(0), *D2)


def test_moved_with_its_outputs() -> None:
    """A sequence that decodes moves with the blocks of its outputs: they are no prompt tokens, and nothing again."""
    account = prefilled(prompt=40)
    compute(account, 1, (40, 90))
    account.apply(1, HandedOver())
    account.apply(1, on(D, found(1, 0, 0, 80)))
    compute(account, 1, (80, 95))
    assert work(ended(account)) == (40, 0, 10, 40)


def test_choices() -> None:
    """Of three choices, the first one's admission is the client's number; what each got is moved."""
    account = prefilled(cached=16, num_choices=3)
    for sequence_id in (3, 1, 2):
        account.apply(sequence_id, on(D, found(1, 0, 0, 64)))
        compute(account, sequence_id, (64, 72))
    record = ended(account)
    assert (record.prompt, record.cached) == (Known(70), Known(16))
    assert work(record) == (3 * 54, 0, 3 * 6, 3 * 64)


def test_list_of_prompts() -> None:
    """Prompts of a list may have different pairs: the record names the first engine of each kind."""
    account = account_of(70, 40)
    for sequence_id, (engine, size) in enumerate([(P, 70), (D2, 40)], 1):
        account.apply(sequence_id, on(engine, found(1, 0, side=Side.PREFILL)))
        compute(account, sequence_id, (0, size))
        first_token(account, sequence_id)
    account.apply(2, HandedOver())
    account.apply(2, on(D, found(1, 0, 0, 32)))
    compute(account, 2, (32, 44))
    record = ended(account)
    assert work(record) == (110, 0, 8, 32)
    assert (record.prompt, record.cached, record.engine, record.decode_engine) == (Known(110), Known(0), 0, 1)


def test_echo() -> None:
    """A prompt whose scores are wanted reads nothing on P; D may take its blocks, and computes none of it twice."""
    account = prefilled(prompt=64)
    account.apply(1, on(D, found(1, 0, 0, 64)))
    compute(account, 1, (64, 70))
    record = ended(account)
    assert (record.cached, work(record)) == (Known(0), (64, 0, 0, 64))


# ---------------------------------------------------------------- what cannot be


def test_decode_side_alone_is_no_hit() -> None:
    """Without the first engine's admission, cached tokens are unknown, and the account is disputed."""
    account = account_of(64)
    account.apply(1, on(D, found(1, 48, 48, 64)))
    first_token(account, 1)
    finish(account, 1)
    assert (account.cached, account.cached_by_tier) == (UNKNOWN, None)
    assert account.problems() == ["sequence 1: its first token came before any admission"]
    assert account.record(20.0).decode_engine is None


@pytest.mark.parametrize("spans", [{"peer": [0, 80]}, {}], ids=["spans", "tiers alone"])
def test_more_moved_than_granted(spans: dict[str, list[int]]) -> None:
    """No more can have been moved than was granted. Of what the executor did not read, nothing counts as moved."""
    account = prefilled()
    account.apply(1, on(D, admission(1, 64, 64, tiers={"peer": 80}, tier_spans=spans, side=Side.DECODE)))
    compute(account, 1, (64, 72))
    finish(account, 1)
    assert account.problems() == ["sequence 1: admission 1: reused 64, moved 80"]
    assert account.record(20.0).moved_tokens == 64


def test_unread_transfer_is_disputed() -> None:
    """Moved blocks that the executor does not confirm are disputed, as any others."""
    account = prefilled()
    account.apply(1, on(D, admission(1, 64, 48, tiers={"peer": 64}, tier_spans={"peer": [0, 64]}, side=Side.DECODE)))
    compute(account, 1, (64, 72))
    finish(account, 1)
    assert account.problems() == ["sequence 1: admission 1: reused 64, read 48"]
    assert (account.cached, account.record(20.0).moved_tokens) == (Known(0), 48)


def test_withdrawn_request_shows_no_engine() -> None:
    """A request for whose record there was no room names neither engine."""
    account = prefilled()
    account.apply(1, on(D, found(1, 0, 0, 64)))
    account.withdraw()
    record = account.record(20.0)
    assert (record.engine, record.decode_engine, record.decode_incarnation) == (None, None, None)
