"""The account with grants from lower tiers, revisions, estimates, and disaggregated engines."""

from __future__ import annotations

import pytest

from quipu.actors.accountant.account import Account
from quipu.actors.accountant.account_entries import Ended, Estimation, Revision
from quipu.actors.messages.accountant import Side
from quipu.actors.messages.counts import UNKNOWN, Count, Estimate, Known
from quipu.actors.messages.tiers import LOWER_TIERS, Tier
from tests.actors.accountant.accounts import account_of, admission, compute, finish, first_token


def granted(reused: int, read: int, **tiers: int) -> Account:
    account = account_of(50)
    account.apply(1, admission(1, reused, read, tiers=tiers))
    return account


# ---------------------------------------------------------------- tiers and revisions


def test_device_settles_at_once_and_lower_tiers_at_first_token() -> None:
    """A load from the host can fail until the first token, so its tokens are not reported before that."""
    assert granted(32, 32, device=32).cached == Known(32)
    account = granted(48, 48, device=32, host=16)
    assert account.admitted_prompts == []
    first_token(account, 1)
    assert account.cached == Known(48)
    assert account.cached_by_tier == {"device": 32, "host": 16, "disk": 0, "remote": 0, "unattributed": 0}


@pytest.mark.parametrize("tier", LOWER_TIERS)
def test_failed_load_is_not_reported_as_hit(tier: Tier) -> None:
    """16 tokens that could not be loaded from a lower tier are computed, and never reported as a hit."""
    account = granted(48, 32, device=32, **{tier.value: 16})
    account.apply(1, Revision(tier, 16))
    compute(account, 1, (32, 50))
    first_token(account, 1)
    finish(account, 1)
    assert account.problems() == []
    assert account.cached == Known(32)
    assert account.sequences[1].computed_first == 18


def test_unrevised_failed_load_is_disputed() -> None:
    """The executor did not read what the manager still counts as reused."""
    account = granted(48, 32, device=32, host=16)
    compute(account, 1, (32, 50))
    first_token(account, 1)
    finish(account, 1)
    assert account.problems() == ["sequence 1: admission 1: reused 48, read 32"]


def test_end_before_first_token_settles() -> None:
    """Tokens loaded before the end count as reused."""
    account = granted(48, 48, host=48)
    account.apply(1, Ended())
    assert account.cached == Known(48)


def test_revision_after_report_is_disputed() -> None:
    """Numbers that have been reported to a client are frozen."""
    account = granted(48, 48, host=48)
    first_token(account, 1)
    account.apply(1, Revision("host", 16))
    assert account.cached == Known(48)
    assert account.problems() == ["sequence 1: 16 tokens of host revised after they were reported"]


@pytest.mark.parametrize(("tier", "num_tokens"), [("host", 17), ("disk", 1), ("host", -16)])
def test_revision_of_tokens_not_granted(tier: str, num_tokens: int) -> None:
    """A revision of tokens that were not granted is a mismatch; no count grows or becomes negative."""
    account = granted(48, 48, device=32, host=16)
    account.apply(1, Revision(tier, num_tokens))
    first_token(account, 1)
    assert account.cached == Known(48)
    assert len(account.problems()) == 1


@pytest.mark.parametrize(
    ("tiers", "unattributed", "disputed"),
    [({}, 48, False), ({"device": 32}, 16, False), ({"tape": 48}, 48, False), ({"device": 48, "host": 16}, -16, True)],
)
def test_tiers_sum_to_the_total(tiers: dict[str, int], unattributed: int, disputed: bool) -> None:
    """Tokens that no tier claims are unattributed; tiers that claim more than the total are disputed, never clamped."""
    account = granted(48, 48, **tiers)
    compute(account, 1, (48, 50))
    first_token(account, 1)
    finish(account, 1)
    assert account.cached_by_tier is not None
    assert account.cached_by_tier["unattributed"] == unattributed
    assert sum(account.cached_by_tier.values()) == 48
    assert bool(account.problems()) is disputed


# ---------------------------------------------------------------- engines that report less, and routers


@pytest.mark.parametrize(("estimated", "cached"), [(None, UNKNOWN), (32, Estimate(32)), (0, Estimate(0))])
def test_engine_that_does_not_count(estimated: int | None, cached: Count) -> None:
    """Cached tokens are a router's estimate or unknown; the prompt is known, and nothing is disputed."""
    account = account_of(50)
    if estimated is not None:
        account.apply(1, Estimation(estimated))
    account.apply(1, admission(1, None, 0))
    assert account.admitted_prompts == []
    first_token(account, 1)
    finish(account, 1)
    assert account.problems() == []
    assert (account.prompt_tokens, account.cached, account.cached_by_tier) == (Known(50), cached, None)


def test_estimate_does_not_replace_a_count() -> None:
    """If the engine has reported a count, the router's estimate is ignored."""
    account = granted(16, 16, device=16)
    account.apply(1, Estimation(48))
    assert account.cached == Known(16)


def test_late_estimate_is_ignored() -> None:
    """Numbers that have been reported to a client are frozen."""
    account = account_of(50)
    first_token(account, 1)
    account.apply(1, Estimation(48))
    assert account.cached == UNKNOWN


def test_engine_that_reports_nothing() -> None:
    """If an engine reports only tokens, cached tokens are unknown, and the account is not disputed."""
    account = account_of(50)
    first_token(account, 1)
    finish(account, 1)
    assert (account.prompt_tokens, account.cached, account.problems()) == (Known(50), UNKNOWN, [])


# ---------------------------------------------------------------- disaggregated pairs


def test_transfer_is_not_a_hit() -> None:
    """The client sees the prefill side's count, whichever side reports first."""
    for order in ((0, 1), (1, 0)):
        account = account_of(50)
        sides = (admission(1, 16, 16), admission(1, 50, 50, side=Side.DECODE))
        for index in order:
            account.apply(1, sides[index])
            if index == 0:
                compute(account, 1, (16, 50))
        first_token(account, 1)
        finish(account, 1)
        assert account.cached == Known(16)
        assert account.problems() == []


def test_decode_side_alone_reports_no_hits() -> None:
    """Without the prefill side's count, hits are unknown, and the account, which lacks its first admission, is
    disputed."""
    account = account_of(50)
    account.apply(1, admission(1, 50, 50, side=Side.DECODE))
    compute(account, 1, (50, 51))
    first_token(account, 1)
    finish(account, 1)
    assert (account.prompt_tokens, account.cached) == (Known(50), UNKNOWN)
    assert account.problems() == ["sequence 1: its first token came before any admission"]


def test_failed_load_before_a_transfer() -> None:
    """The revision applies to the prefill side; the transfer has two matching entries of its own."""
    account = granted(48, 32, device=32, host=16)
    account.apply(1, Revision("host", 16))
    compute(account, 1, (32, 50))
    account.apply(1, admission(1, 50, 50, side=Side.DECODE))
    first_token(account, 1)
    finish(account, 1)
    assert (account.cached, account.problems()) == (Known(32), [])
