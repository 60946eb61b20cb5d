"""What a choice consists of, from its events in any division into deltas, and the ids of its calls."""

from __future__ import annotations

import random

from quipu.actors.messages.output import ArgumentsDelta, CallBegin, CallEnd, Markup, ReasoningDelta, TextDelta
from quipu.web.api.content import CallBlock, CallIds, Content, ReasoningBlock, shown_events
from quipu.web.api.stream import Transcript
from quipu.web.request.tally import Tally
from tests.web.outputs import SOME_CALL, Part, draw_deltas, draw_output, parts_of


def parts_in(content: Content) -> list[Part]:
    parts = []
    for block in content.blocks:
        if isinstance(block, CallBlock):
            parts.append(Part("call", str(block.text), block.name, block.is_complete))
        else:
            parts.append(Part("reasoning" if isinstance(block, ReasoningBlock) else "text", str(block.text)))
    return parts


def test_blocks_of_any_output() -> None:
    """However an output is divided, and wherever it ends, its blocks are the same and in order."""
    for seed in range(300):
        rng = random.Random(seed)
        events = draw_output(rng)
        for with_reasoning in (True, False):
            transcript = Transcript(Tally(), with_reasoning)
            transcript.consume(draw_deltas(rng, events))
            assert parts_in(transcript.content(0)) == parts_of(events, with_reasoning=with_reasoning), seed


def test_reasoning_is_counted_even_if_it_is_not_shown() -> None:
    """Reasoning tokens count in the running usage of a client that asked not to see them."""
    transcript = Transcript(Tally(), with_reasoning=False)
    transcript.consume(draw_deltas(random.Random(1), SOME_CALL[:2]))
    assert transcript.tally.reasoning_tokens == transcript.tally.completion_tokens > 0
    assert transcript.content(0).reasoning == ""


def test_events_out_of_place_are_harmless() -> None:
    """Arguments and ends without an open call are ignored."""
    content = Content()
    for event in (ArgumentsDelta(0, "{"), CallEnd(3), TextDelta("a"), CallEnd(0), CallBegin(0, "f"), CallEnd(0)):
        content.add(event)
    content.add(ArgumentsDelta(0, "late"))
    assert parts_in(content) == [Part("text", "a"), Part("call", "", "f", is_complete=True)]


def test_events_of_a_delta_are_joined() -> None:
    """Adjacent texts of a kind become one event; delimiters are dropped, and arguments of two calls stay apart."""
    events = (
        TextDelta("a"), Markup("<"), TextDelta("b"), CallBegin(0, "f"), ArgumentsDelta(0, "{"), ArgumentsDelta(0, ""),
        ArgumentsDelta(0, "}"), ArgumentsDelta(1, "x"), ReasoningDelta("c"), TextDelta(""), ReasoningDelta("d"),
    )  # fmt: skip
    assert list(shown_events(events, with_reasoning=True)) == [
        TextDelta("ab"), CallBegin(0, "f"), ArgumentsDelta(0, "{}"), ArgumentsDelta(1, "x"), ReasoningDelta("cd")
    ]  # fmt: skip
    assert list(shown_events((TextDelta(""),), with_reasoning=True)) == []


def test_ids_of_calls() -> None:
    """Ids are letters and digits, the same every time, and no two calls of any request share one."""
    for are_short, num_chars in ((False, 24), (True, 9)):
        ids = [
            CallIds(request_id, are_short).call_id("call_", choice, call)
            for request_id in ("r1", "r11") for choice in range(12) for call in range(120)
        ]  # fmt: skip
        assert len(set(ids)) == len(ids)
        bare = {one if are_short else one.removeprefix("call_") for one in ids}
        assert all(len(one) == num_chars and one.isascii() and one.isalnum() for one in bare)
    assert CallIds("r1").call_id("toolu_", 0, 1) == CallIds("r1").call_id("toolu_", 0, 1)
