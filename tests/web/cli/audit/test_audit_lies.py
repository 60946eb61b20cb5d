"""Every lie is caught, and no truthful server is accused."""

from __future__ import annotations

import pytest

from quipu.web.cli.audit.request_body import Target
from quipu.web.cli.audit.verdicts import Verdict
from tests.web.cli.audit.drawn_truths import draw_truth
from tests.web.cli.audit.fake_audits import URL, accused, audit, verdicts_of
from tests.web.cli.audit.fake_server import FakeServer, Truth

CHAT = {"apis": ("chat",)}
LISTS = {"apis": ("completions",)}
CAUGHT_BY = {
    "doubled_by_preemption": ("pressure", {**CHAT, "has_pressure": True}),
    "zero_dropped": ("zero", CHAT),
    "length_guess": ("prefix", CHAT),
    "per_choice": ("choices", CHAT),
    "decode_side": ("cold", CHAT),
    "router_estimate": ("prefix", {**CHAT, "prompt_tokens": 600}),
    "missing_in_streams": ("reported", CHAT),
    "usage_twice": ("once", CHAT),
    "more_than_prompt": ("counts", CHAT),
    "negative": ("counts", CHAT),
    "true": ("counts", CHAT),
    "fraction": ("counts", CHAT),
    "text": ("counts", CHAT),
    "last_of_list": ("list", LISTS),
    "input_has_cached": ("total", {"apis": ("messages",)}),
    "warm_up_of_choices": ("choices", CHAT),
    "start_differs": ("once", {"apis": ("messages",)}),
    "count_grows": ("prefix", CHAT),
    "counter_doubles": ("counters", {**CHAT, "metrics_url": "http://fake/metrics"}),
}


@pytest.mark.parametrize("lie", CAUGHT_BY)
def test_lies_are_caught(lie: str) -> None:
    """Each lie makes the check that is about it false."""
    check, how = CAUGHT_BY[lie]
    assert check in accused(FakeServer(lie=lie), **how)


def test_truth_is_seen() -> None:
    """All checks of a server that tells everything are true, in all APIs, streamed or not."""
    server = FakeServer()
    outcome = audit(server, has_pressure=True, metrics_url="http://fake/metrics")
    found = {verdict: verdicts_of(outcome, verdict) for verdict in Verdict}
    assert not found[Verdict.FALSE] and not found[Verdict.UNKNOWN]
    assert len(found[Verdict.TRUE]) == 22
    assert set(found[Verdict.NOT_APPLICABLE]) == {"stop", "key"}
    assert (server.num_open, server.most_open) == (0, 4)


@pytest.mark.parametrize("seed", range(4))
def test_truthful_servers_are_not_accused(seed: int) -> None:
    """Eviction, replicas, unsure caches, others' prompts, retries and odd times never make anything false.

    `python -m tests.web.cli.audit.drawn_truths` does this with 200 servers.
    """
    truth, how = draw_truth(seed)
    assert accused(FakeServer(truth, seed=seed), seed=seed, **how) == {}


def test_keys_of_two_tenants() -> None:
    """What one key has sent is not cached for the other, or else that is false."""
    target = Target(URL, "m", "one", "another")
    (kept,) = verdicts_of(audit(FakeServer(), target=target, **CHAT), Verdict.TRUE)["key"]
    assert kept.reason.endswith("0 with the other")
    assert "key" in accused(FakeServer(Truth(keeps_keys_apart=False)), target=target, **CHAT)


def test_silence_is_unknown() -> None:
    """A server that says nothing of its cache is not called a liar, even if its times show hits."""
    outcome = audit(FakeServer(Truth(reporting=frozenset())), **CHAT)
    assert not verdicts_of(outcome, Verdict.FALSE)
    (time,) = verdicts_of(outcome, Verdict.UNKNOWN)["time"]
    assert "as of a hit, while the server does not say" in time.reason


def test_claims_without_time_are_doubted() -> None:
    """A hit that saves no time is doubtful, and so is one that is kept quiet; both are unknown, not false."""
    slow = audit(FakeServer(lie="claims_hits"), **CHAT)
    (claimed,) = verdicts_of(slow, Verdict.UNKNOWN)["time"]
    assert claimed.reason.startswith("doubtful: first token after") and "are said to be cached" in claimed.reason
    quiet = audit(FakeServer(lie="hides_hits"), **CHAT)
    (hidden,) = verdicts_of(quiet, Verdict.UNKNOWN)["time"]
    assert hidden.reason.startswith("doubtful:") and "0 is said to be cached" in hidden.reason


def test_server_with_blocks_of_one_token() -> None:
    """The size of a block is inferred, also of a server that has none."""
    for size, words in ((1, "single tokens"), (64, "blocks of 64")):
        outcome = audit(FakeServer(Truth(block_size=size)), **LISTS)
        (blocks,) = verdicts_of(outcome, Verdict.TRUE)["blocks"]
        assert words in blocks.reason
