"""Outputs of a model as the detokenizer sends them: drawn at random, with what they consist of."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from itertools import groupby

import attrs

from quipu.actors.messages.handler import Closed, Delta, OutletEvent, ScoredDelta
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.output import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    Markup,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from quipu.actors.messages.scores import ScoredToken
from tests.web.fakes import STARTED, record

CHARS = 'ab "\\\n\u2028é😀<|{}'
MALFORMED = ("[1, 2]", '{"a": 1', "{'a': 1}", "null", "x", '{"a": 1}}')
NAMES = ("get_weather", "shell", 'odd"name')
SOME_CALL = (
    ReasoningDelta("Let me "),
    ReasoningDelta("look."),
    Markup("</think>"),
    TextDelta("I look."),
    Markup("<tool_call>"),
    CallBegin(0, "get_weather"),
    ArgumentsDelta(0, '{"city":'),
    ArgumentsDelta(0, ' "Cusco"}'),
    CallEnd(0, "</tool_call>"),
)
"""Reasoning, a text and a call, in order."""


@attrs.frozen
class Part:
    """What a client should see as one block."""

    kind: str
    """`text`, `reasoning` or `call`."""
    text: str
    name: str = ""
    is_complete: bool = False


def deltas(*events: OutputEvent, index: int = 0) -> list[OutletEvent]:
    """Return a delta for each event."""
    return [_delta(index, (event,)) for event in events]


def script(*events: OutputEvent, reason: FinishReason = FinishReason.STOP) -> list[OutletEvent]:
    """Play an output, one event for each token, and its end."""
    return [STARTED, *deltas(*events), Delta(0, "", 1, reason), Closed(record(), None)]


def draw_output(rng: random.Random) -> list[OutputEvent]:
    """Draw an output, which may end anywhere, also within a call."""
    events: list[OutputEvent] = []
    num_calls = 0
    for _ in range(rng.randrange(6)):
        kind = rng.choice(("text", "reasoning", "call", "call", "markup"))
        if kind == "markup":
            events.append(Markup("<think>"))
        elif kind == "call":
            pieces = split(rng, rng.choice((json.dumps({"a": draw_text(rng)}), "{}", "", rng.choice(MALFORMED))))
            events.append(CallBegin(num_calls, rng.choice(NAMES)))
            events += [ArgumentsDelta(num_calls, piece) for piece in pieces]
            events.append(CallEnd(num_calls))
            num_calls += 1
        else:
            make = TextDelta if kind == "text" else ReasoningDelta
            events += [make(piece) for piece in split(rng, draw_text(rng))]
    return events if rng.random() < 0.5 else events[: rng.randrange(len(events) + 1)]


def draw_text(rng: random.Random) -> str:
    return "".join(rng.choices(CHARS, k=rng.randrange(12)))


def split(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(4)))
    return [text[start:end] for start, end in zip((0, *cuts), (*cuts, len(text)), strict=True)]


def draw_deltas(rng: random.Random, events: Iterable[OutputEvent], index: int = 0) -> list[OutletEvent]:
    """Distribute events over deltas at random; texts alone may be plain, as before anything is known of an output."""
    told: list[OutletEvent] = []
    waiting: list[OutputEvent] = []
    for event in events:
        if isinstance(event, TextDelta) and not waiting and rng.random() < 0.3:
            told.append(Delta(index, event.text, 1, None))
            continue
        waiting.append(event)
        if rng.random() < 0.6:
            told.append(_delta(index, tuple(waiting)))
            waiting.clear()
    if waiting:
        told.append(_delta(index, tuple(waiting)))
    return told


def _delta(index: int, events: tuple[OutputEvent, ...]) -> Delta:
    num_reasoning = int(any(isinstance(event, ReasoningDelta) for event in events))
    return Delta(index, "", 1, None, events=events, num_reasoning_tokens=num_reasoning)


def scored(delta: OutletEvent, token: ScoredToken) -> OutletEvent:
    """Return a delta with a token's logprobs and its id; other events as they are."""
    if not isinstance(delta, Delta):
        return delta
    return ScoredDelta(
        delta.index,
        delta.text,
        delta.num_tokens,
        delta.finish_reason,
        events=delta.events,
        token_ids=(token.token_id,),
        scores=(token,),
    )


def parts_of(events: Iterable[OutputEvent], *, with_reasoning: bool = True) -> list[Part]:
    """Return what an output consists of, put together in a straightforward way."""
    seen = [event for event in events if not isinstance(event, Markup)]
    if not with_reasoning:
        seen = [event for event in seen if not isinstance(event, ReasoningDelta)]
    seen = [event for event in seen if not isinstance(event, (TextDelta, ReasoningDelta)) or event.text]
    parts: list[Part] = []
    for key, group in groupby(seen, key=_key):
        members = list(group)
        text = "".join(
            event.text for event in members if isinstance(event, (TextDelta, ReasoningDelta, ArgumentsDelta))
        )
        begin = members[0]
        name = begin.name if isinstance(begin, CallBegin) else ""
        kind = key if isinstance(key, str) else "call"
        parts.append(Part(kind, text, name, any(isinstance(event, CallEnd) for event in members)))
    return parts


def _key(event: OutputEvent) -> str | int:
    match event:
        case TextDelta():
            return "text"
        case ReasoningDelta():
            return "reasoning"
        case CallBegin() | ArgumentsDelta() | CallEnd():
            return event.index
    raise ValueError(event)
