"""Faulty reports to the accountant: each kind is detected, and the client is answered anyway.

The account is disputed, counted and logged as an error; the client gets its response, with the numbers of the first
admission; nothing is left behind. Without faults the same runtime disputes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import structlog.testing
import trio

from quipu.actors.messages.accountant import StepReport
from tests.fake_oracle import continuation
from tests.faulty_engine import EngineFaults, faulty_runtime
from tests.runtimes import BLOCK, Client, most_tokens, text_of
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

TWO, THREE = 2 * BLOCK, 3 * BLOCK
KNOWN = prompt_of(TWO, seed=1)
PROMPT = KNOWN + prompt_of(4 * BLOCK + 6, seed=2)
"""Two blocks of it are cached, and the rest is computed in three chunks."""
PROBLEM_EVENTS = "account.disputed", "report.lost", "report.repeated", "report.unreadable"


@attrs.frozen
class Observed:
    """What the client received, and what metrics and log contain, for one request."""

    status: int
    text: str
    usage: dict[str, Any]
    num_disputed: int
    lines: list[dict[str, Any]]

    def problems(self) -> str:
        (line,) = (line for line in self.lines if line["event"] == "account.disputed")
        assert line["log_level"] == "error"
        assert line["record"]["disputed"]
        return "\n".join(line["problems"])


async def send_request(client: Client, *, stream: bool) -> Observed:
    """Send one request for PROMPT over HTTP and read it to the end."""
    before = samples(client)["usage_disputed_total"]
    with structlog.testing.capture_logs() as lines:
        if stream:
            exchange, chunks = await over_http(client).stream(COMPLETIONS, body(PROMPT, **STREAMED))
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk != "[DONE]" and chunk["choices"])
            usage = chunks[-2]["usage"]
        else:
            exchange, answer = await over_http(client).post(COMPLETIONS, body(PROMPT))
            text, usage = answer["choices"][0]["text"], answer["usage"]
        await settle(client)
    num_disputed = samples(client)["usage_disputed_total"] - before
    return Observed(
        exchange.status, text, usage, int(num_disputed), [line for line in lines if line["event"] in PROBLEM_EVENTS]
    )


async def with_dials(*, stream: bool, **dials: Any) -> Observed:
    """Open a warm runtime without faults, then set the dials."""
    faults = EngineFaults()
    async with faulty_runtime(faults, num_blocks=12, max_model_len=11 * BLOCK, max_num_batched_tokens=TWO) as client:
        for seed in (10, 11):  # every block has been used
            await client.ask(prompt_of(10 * BLOCK + 8, seed))
        await client.ask([*KNOWN, 300], max_tokens=1)
        await settle(client)
        for name, value in dials.items():
            setattr(faults, name, value)
        result = await send_request(client, stream=stream)
        assert faults.num_injected > 0 or not dials, "the dial had no effect"
        return result


def is_prompt_chunk(report: StepReport) -> bool:
    """Match the report of a chunk in the middle of the prompt: no admission, no token."""
    return bool(report.span_ids) and not report.admitted_ids and not report.token_ids


def has_terminal(report: StepReport) -> bool:
    return bool(report.terminal_ids)


BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
FAULTY_REPORTS: list[Any] = [
    pytest.param({"over_read": 1}, TWO, f"reused {TWO}, read {THREE}", id="the executor reads too much"),
    pytest.param({"under_read": 1}, TWO, f"reused {TWO}, read {BLOCK}", id="the executor reads too little"),
    pytest.param({"over_grant": 1}, THREE, f"reused {THREE}, read {TWO}", id="the manager grants too much"),
    pytest.param({"under_report": 1}, BLOCK, f"reused {BLOCK}, read {TWO}", id="the manager books less than it grants"),
    pytest.param({"overwritten": True}, TWO, f"reused {TWO}, read 0", id="a granted block was overwritten"),
    pytest.param({"lose": is_prompt_chunk}, TWO, "a report was lost", id="a report is lost"),
    pytest.param({"spans_after_terminal": True}, TWO, "Span after its end", id="spans come too late"),
    pytest.param({"over_copied": BLOCK - 1}, TWO, f"copyable 0, copied {BLOCK - 1}", id="the executor reports a copy"),
    pytest.param({"no_admissions": True}, None, "its first token came before any admission", id="no admission"),
    pytest.param({"ragged": True}, None, "a report was lost", id="a report that cannot be read"),
]


@BOTH
@pytest.mark.parametrize(("dials", "cached", "problem"), FAULTY_REPORTS)
async def test_fault_is_detected(
    autojump_clock: trio.abc.Clock, dials: dict[str, Any], cached: int | None, problem: str, stream: bool
) -> None:
    """The account is disputed, counted and logged as an error; the client gets its response."""
    result = await with_dials(stream=stream, **dials)
    assert result.num_disputed == 1
    assert problem in result.problems()
    assert result.status == 200
    assert result.usage["prompt_tokens"] == len(PROMPT)
    details = result.usage["prompt_tokens_details"]
    assert details.get("cached_tokens") == cached and ("cached_tokens" in details) == (cached is not None)
    assert result.usage["completion_tokens"] == 8
    is_wrong = result.text != text_of(continuation(PROMPT, 8))
    assert is_wrong is bool({"over_grant", "overwritten"} & dials.keys()), (
        "the text must be wrong exactly if KV contents were wrong"
    )


@BOTH
@pytest.mark.parametrize("dials", [{}, {"repeat": True}], ids=["every dial off", "reports come twice"])
async def test_no_fault(autojump_clock: trio.abc.Clock, dials: dict[str, Any], stream: bool) -> None:
    """A correct runtime disputes nothing; a repeated report is booked and passed on once."""
    result = await with_dials(stream=stream, **dials)
    assert result.num_disputed == 0
    assert result.text == text_of(continuation(PROMPT, 8))
    assert result.usage["prompt_tokens_details"]["cached_tokens"] == TWO
    assert result.usage["completion_tokens"] == 8
    assert {line["event"] for line in result.lines} == ({"report.repeated"} if dials else set())


async def test_repeated_reports_count_once(autojump_clock: trio.abc.Clock) -> None:
    """Counters, gauges and histograms are the same as if every report came once."""
    seen = []
    for repeat in (False, True):
        async with faulty_runtime(EngineFaults(repeat=repeat)) as client:
            await send_request(client, stream=False)
            seen.append({name: value for name, value in samples(client).items() if "_seconds_" not in name})
            seen[-1]["tokens timed"] = samples(client)["inter_token_latency_seconds_count"]
    assert seen[0] == seen[1]


def nth(number: int) -> Callable[[StepReport], bool]:
    """Match the n-th report from now on."""
    count = 0

    def is_nth(report: StepReport) -> bool:
        nonlocal count
        count += 1
        return count == number

    return is_nth


CHUNK = 32
MOST_REPORTS = -(-len(PROMPT) // CHUNK) + 7
"""Of a prompt's chunks and eight tokens, if each token takes a step; the last chunk draws the first."""


async def num_reports() -> int:
    """Return how many reports `PROMPT` takes."""
    count = 0

    def note(_: StepReport) -> bool:
        nonlocal count
        count += 1
        return False

    async with faulty_runtime(EngineFaults(lose=note), max_num_batched_tokens=CHUNK) as client:
        await client.ask(PROMPT)
        await trio.sleep(1)
    return count


@pytest.mark.parametrize("number", range(1, MOST_REPORTS + 2))
async def test_any_report_may_be_lost(autojump_clock: trio.abc.Clock, number: int) -> None:
    """Even if a report with tokens or a Terminal is lost, the next report reveals it, nothing leaks, and others are
    served."""
    faults, num_expected = EngineFaults(), await num_reports()
    assert num_expected == MOST_REPORTS if most_tokens.get() == 1 else 5 < num_expected < MOST_REPORTS
    async with faulty_runtime(faults, max_num_batched_tokens=CHUNK) as client:
        ticket = client.open(PROMPT)
        await ticket.start()
        faults.lose = nth(number)
        await trio.sleep(1)
        was_lost = faults.num_injected == 1
        faults.lose = None
        others = [await client.ask(prompt_of(20, seed=seed)) for seed in (5, 6)]
        await trio.sleep(1)
        closed = ticket.mailbox.closed
        ticket.leave()
        await settle(client)
        num_disputed = samples(client)["usage_disputed_total"]
    assert was_lost is (number <= num_expected)
    assert closed is not None, "its client must not wait for a report that was lost"
    assert closed.record.disputed is was_lost
    assert num_disputed >= was_lost
    assert [other.error for other in others] == [None, None]
    assert not others[1].record.disputed


async def test_spans_after_the_end_are_disputed(autojump_clock: trio.abc.Clock) -> None:
    """Spans that arrive after their sequence has ended are disputed, though everything would balance."""
    faults = EngineFaults(spans_after_terminal=True)
    async with faulty_runtime(faults, max_num_seqs=1) as client:
        with structlog.testing.capture_logs() as lines:
            answer = await client.ask(PROMPT, n=2, temperature=1.0)
            await settle(client)
    assert answer.error is None
    (line,) = (line for line in lines if line["event"] == "account.disputed")
    assert "Span after its end" in str(line["problems"])


async def test_mismatch_affects_only_its_own_request(autojump_clock: trio.abc.Clock) -> None:
    """The request before and the request after are not disputed."""
    faults = EngineFaults()
    async with faulty_runtime(faults) as client:
        before = await client.ask(PROMPT)
        faults.over_read = 1
        disputed = await client.ask(PROMPT)
        faults.over_read = 0
        after = await client.ask(PROMPT)
        await settle(client)
    assert [answer.record.disputed for answer in (before, disputed, after)] == [False, True, False]
