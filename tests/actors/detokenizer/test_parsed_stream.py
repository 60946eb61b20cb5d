"""From token ids to events: events add up to the output, and only the answer's text is searched for stop strings."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.detokenizer.decoder import ByteDecoder
from quipu.actors.detokenizer.parsed_stream import ParsedStream, ParserFailed
from quipu.actors.detokenizer.response_parsing.parser_choice import choose
from quipu.actors.detokenizer.response_parsing.response_parser import ResponseParser
from quipu.actors.detokenizer.response_parsing.response_template import ResponseTemplate
from quipu.actors.detokenizer.stop_strings import StopStrings
from quipu.actors.detokenizer.text_stream import Piece, StopMatcher
from quipu.actors.messages.output import ArgumentsDelta, CallBegin, CallEnd, OutputEvent, ReasoningDelta, TextDelta

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "stop"}}\n</tool_call>'
PIECES = ["<think>", "</think>", "stop", " st", "op", CALL, CALL[:30], CALL[30:], "\n", "Yes", "s", "t", "é"]


@cache
def template() -> ResponseTemplate:
    chosen = choose("hermes", "qwen3", None, None, {}).template
    assert chosen is not None
    return chosen


def stream_of(
    pieces: list[str], stops: tuple[str, ...] = (), *, max_calls: int | None = None, num_ignored: int = 0
) -> ParsedStream:
    parser = ResponseParser(template(), {"f": {}}, ())
    matcher = StopMatcher(StopStrings(stops) if stops else None, num_ignored=num_ignored)
    return ParsedStream(ByteDecoder([piece.encode() for piece in pieces]), parser, matcher, max_calls)


def run(stream: ParsedStream, num_tokens: int) -> tuple[list[OutputEvent], Piece]:
    """Return all events of a stream, and its last piece."""
    events: list[OutputEvent] = []
    piece = Piece("")
    for token_id in range(num_tokens):
        piece = stream.push(token_id)
        events += piece.events or ((TextDelta(piece.text),) if piece.text else ())
        assert not (piece.events and piece.text)
        if piece.is_complete:
            return events, piece
    piece = stream.flush()
    events += piece.events or ((TextDelta(piece.text),) if piece.text else ())
    return events, piece


def text_in(events: list[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_nothing_is_lost(pieces: list[str]) -> None:
    """Without stop strings, the sources of all events are the output."""
    events, last = run(stream_of(pieces), len(pieces))
    assert "".join(event.source for event in events) == "".join(pieces)
    assert last.match is None


@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_the_answers_text_is_cut_at_a_stop_string(pieces: list[str]) -> None:
    """With a stop string, the events are the same as without, up to the text in which it begins."""
    free, _ = run(stream_of(pieces), len(pieces))
    cut, last = run(stream_of(pieces, ("stop",)), len(pieces))
    runs = text_runs(free)
    first = next((at for at, (_, text) in enumerate(runs) if "stop" in text), None)
    if first is None:
        assert last.match is None
        assert text_runs(cut) == runs
    else:
        assert last.match == "stop"
        head, text = runs[first]
        before = text[: text.index("stop")]
        assert text_runs(cut) == [*runs[:first], *([(head, before)] if head or before else [])]


def text_runs(events: list[OutputEvent]) -> list[tuple[tuple[OutputEvent, ...], str]]:
    """Return each run of text with the other events before it."""
    runs: list[tuple[tuple[OutputEvent, ...], str]] = []
    others: list[OutputEvent] = []
    text = ""
    for event in events:
        if isinstance(event, TextDelta):
            text += event.text
            continue
        if text:
            runs.append((tuple(others), text))
            others, text = [], ""
        others.append(event)
    return [*runs, (tuple(others), text)] if others or text else runs


def test_only_text_is_searched() -> None:
    """A stop string in reasoning or in a call does not end the output, nor does one that a call interrupts."""
    pieces = ["<think>", "stop", "</think>", "st", CALL, "op", " and", " stop", "!"]
    events, last = run(stream_of(pieces, ("stop",)), len(pieces))
    assert last.match == "stop"
    assert [type(event) for event in events].count(CallEnd) == 1
    assert text_in(events) == "stop and "
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)).strip() == "stop"


@pytest.mark.parametrize(("num_ignored", "shown"), [(0, ""), (1, ""), (2, "stopYes"), (3, "stopYes")])
def test_ignored_tokens_are_counted_whatever_they_mean(num_ignored: int, shown: str) -> None:
    """A stop string that completes within the first tokens is ignored; a token of a call counts as one."""
    pieces = [CALL, "stop", "Yes", "stop"]
    events, last = run(stream_of(pieces, ("stop",), num_ignored=num_ignored), len(pieces))
    assert last.match == "stop"
    assert text_in(events) == shown


def test_the_last_wanted_call_completes_the_output() -> None:
    """Nothing is released after the last wanted call, not even from the same token."""
    pieces = ["Yes", CALL + "\n" + CALL + "more", "more"]
    events, last = run(stream_of(pieces, max_calls=1), len(pieces))
    assert last.is_complete and last.match is None
    assert [event.index for event in events if isinstance(event, CallBegin)] == [0]
    assert isinstance(events[-1], CallEnd)
    assert "".join(event.text for event in events if isinstance(event, ArgumentsDelta)) == '{"x": "stop"}'


def test_a_hidden_last_token_is_counted() -> None:
    """The token that ends an output within reasoning counts as a token of reasoning, though it is not shown."""
    stream = stream_of(["<think>", "Yes"])
    stream.push(0)
    stream.push(1)
    stream.push_hidden(9)
    assert stream.num_reasoning_tokens == 3


def test_parser_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of the parser becomes ParserFailed, so that the detokenizer fails only that sequence's request."""

    def fail(*_: object) -> None:
        raise IndexError("planted")

    monkeypatch.setattr(ResponseParser, "push", fail)
    with pytest.raises(ParserFailed) as raised:
        stream_of(["Yes"]).push(0)
    assert isinstance(raised.value.__cause__, IndexError)
