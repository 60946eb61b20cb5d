"""What a response contained and when: times of chunks with output, reported usage, and how it ended."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.web.cli.bench.answer import AnswerReader, Failure, Outcome, Piece, ReportedUsage
from tests.web.cli.bench.bench_server import DONE, chat_event, event, text_event, usage_event


def read(*arrivals: tuple[float, bytes], end_s: float = 9.0, failure: Failure | None = None) -> Outcome:
    reader = AnswerReader(started_s=1.0)
    for now_s, data in arrivals:
        reader.feed(data, now_s)
    return reader.end(end_s, failure)


def usage_after(*events: bytes) -> ReportedUsage:
    return read((2.0, text_event("x", "stop") + b"".join(events) + DONE)).usage


def test_times_of_a_whole_answer() -> None:
    """Times are those of chunks with output; the end is `[DONE]`; `usage: null` in chunks is ignored."""
    outcome = read(
        (1.5, text_event("", usage=None)),
        (1.7, b"data:\n\n: still here\n\n"),
        (2.0, text_event("one", usage=None)),
        (2.5, text_event(" two", usage=None) + text_event(" three", "length", usage=None)),
        (3.0, usage_event(100, 3, cached_tokens=32)),
        (3.5, DONE),
    )
    assert outcome.failure is None
    assert outcome.saw_done
    assert (outcome.first_token_s, outcome.output_at_s, outcome.ended_s) == (2.0, (2.0, 2.5, 2.5), 3.5)
    assert outcome.gaps_s == (0.25, 0.25)
    assert (outcome.finished_s, outcome.output_s) == (2.5, 0.5)
    assert outcome.text == "one two three"
    assert outcome.usage == ReportedUsage(100, 3, 32)


def test_last_token_without_text() -> None:
    """The output lasts until the finish reason, with which a token comes that shows no text."""
    outcome = read((2.0, text_event("one")), (2.25, text_event("", "stop")), (4.0, usage_event(9, 2) + DONE))
    assert (outcome.output_at_s, outcome.gaps_s) == ((2.0,), ())
    assert (outcome.finished_s, outcome.output_s) == (2.25, 0.25)


def test_all_at_once() -> None:
    """Of an output that arrives with one read, it is not known how long it took, nor its gaps: that is not 0."""
    outcome = read((2.0, text_event("one") + text_event(" two") + text_event(" three", "length") + DONE))
    assert outcome.output_at_s == (2.0, 2.0, 2.0)
    assert (outcome.output_s, outcome.gaps_s) == (None, ())


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning_content": "x"},
        {"reasoning": "x"},
        {"refusal": "x"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
    ],
)
def test_what_counts_as_output_of_chat(delta: dict[str, Any]) -> None:
    """A chunk with only a role is not output; text, reasoning, a refusal and a tool call are."""
    opening = chat_event({"role": "assistant", "content": ""})
    outcome = read((2.0, opening), (3.0, chat_event(delta)), (4.0, chat_event({}, "stop") + DONE))
    assert outcome.output_at_s == (3.0,)
    assert outcome.failure is None


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"cached_tokens": 0}, 0),
        ({"cached_tokens": 7}, 7),
        ({"cached_tokens": None}, None),
        ({"cached_tokens": -1}, None),
        ({"audio_tokens": 0}, None),
        ({}, None),
    ],
)
def test_unknown_is_not_zero(details: dict[str, Any], cached: int | None) -> None:
    """Null, missing and -1 are unknown; 0 is a count."""
    assert usage_after(usage_event(100, 3, **details)) == ReportedUsage(100, 3, cached)


def test_no_usage_at_all() -> None:
    """If a server sends no usage, it is unknown."""
    assert usage_after() == ReportedUsage(None, None, None)
    assert usage_after(event({"choices": [], "usage": None})) == ReportedUsage(None, None, None)


def test_running_usage() -> None:
    """If every chunk has usage, the last one counts."""
    assert (
        usage_after(usage_event(100, 1, cached_tokens=16), usage_event(100, 2, cached_tokens=16)).completion_tokens == 2
    )


def test_end_without_done() -> None:
    """A stream that ends after its finish reason is complete; one that ends before is not."""
    finished = read((2.0, text_event("one", "stop")))
    assert finished.failure is None
    assert not finished.saw_done
    assert finished.ended_s == 9.0
    early = read((2.0, text_event("one")))
    assert early.failure is not None and early.failure.kind == "stream_ended_early"
    torn = read((2.0, text_event("one", "stop") + b'data: {"usa'))
    assert torn.failure is not None and torn.failure.kind == "stream_ended_early"


def test_cut_off() -> None:
    """Whatever ended the stream is the failure, unless the response was complete."""
    cut = Failure("stream_cut", "gone")
    assert read((2.0, text_event("one", "stop")), failure=cut).failure == cut
    assert read((2.0, text_event("one", "stop") + DONE), failure=cut).failure is None


@pytest.mark.parametrize("error", [{"error": {"message": "no room", "code": 503}}, {"error": "no room"}])
def test_error_in_mid_stream(error: dict[str, Any]) -> None:
    """An error event fails the request with its message, whatever follows."""
    outcome = read((2.0, text_event("one") + event(error) + text_event("two", "stop") + DONE))
    assert outcome.failure == Failure("error_event", "no room")
    assert outcome.text == "one"
    assert not outcome.saw_done


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: []\n\n", b'data: {"choices": 1}\n\n', b"data: \xff\n\n"])
def test_event_that_is_no_chunk(data: bytes) -> None:
    """An event that is not a chunk fails the request and is quoted."""
    outcome = read((2.0, data))
    assert outcome.failure is not None and outcome.failure.kind == "bad_event"


def test_pieces_are_passed_on_as_they_arrive() -> None:
    """Each piece of text is passed on by the call that completes its event, reasoning as such and not in the text."""
    pieces: list[Piece] = []
    reader = AnswerReader(1.0, pieces.append)
    first = chat_event({"reasoning_content": "hm"})
    reader.feed(first[:20], 1.1)
    assert pieces == []
    reader.feed(first[20:] + chat_event({"reasoning": "m", "content": "wörd"}), 1.2)
    assert pieces == [Piece("hm", is_reasoning=True), Piece("m", is_reasoning=True), Piece("wörd")]
    reader.feed(text_event(" two", "length"), 1.3)
    assert pieces[3:] == [Piece(" two")]
    outcome = reader.end(2.0)
    assert (outcome.text, outcome.finish_reason, outcome.failure) == ("wörd two", "length", None)
