"""Which tokens are those of an answer's text, however the output is cut into tokens and events."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from quipu.actors.messages.handler import ScoredDelta
from quipu.actors.messages.output import CallBegin, CallEnd, Markup, OutputEvent, ReasoningDelta, TextDelta
from quipu.actors.messages.scores import ScoredToken
from quipu.web.api.content import TextBlock
from quipu.web.api.stream import Transcript
from quipu.web.api.text_scores import TextScores
from quipu.web.request.tally import Tally
from tests.web.outputs import draw_text, split


def token(number: int, utf8: bytes, offset: int) -> ScoredToken:
    return ScoredToken(number, utf8.decode(errors="replace"), utf8, offset, -float(number), 1, ())


def texts_of(scores: TextScores, num_blocks: int) -> list[list[int]]:
    """Return the ids of the tokens of each block."""
    every = [found.token_id for found in scores.columns.tokens(0, len(scores.columns), 0)]
    return [[every[at] for at in scores.block(number)] for number in range(num_blocks)]


def draw_events(rng: random.Random) -> list[OutputEvent]:
    events: list[OutputEvent] = []
    for _ in range(rng.randrange(1, 7)):
        match rng.choice(("text", "text", "reasoning", "call", "markup")):
            case "text":
                events += map(TextDelta, split(rng, draw_text(rng)))
            case "reasoning":
                events += map(ReasoningDelta, split(rng, draw_text(rng)))
            case "call":
                events += [CallBegin(0, "f", "<call>"), CallEnd(0, "</call>")]
            case _:
                events.append(Markup("<é>"))
    return events


def draw_tokens(rng: random.Random, output: str) -> list[tuple[ScoredToken, int]]:
    """Return tokens of any bytes, each with the number of characters that are complete after it."""
    data = output.encode()
    cuts = sorted({0, len(data), *rng.choices(range(len(data) + 1), k=rng.randrange(12))})
    known = [len(data[:end].decode(errors="ignore")) for end in cuts]
    pairs = zip(pairwise(cuts), pairwise(known), strict=True)
    return [
        (token(number, data[start:end], before), after) for number, ((start, end), (before, after)) in enumerate(pairs)
    ]


def deltas(
    rng: random.Random, events: Sequence[OutputEvent], tokens: list[tuple[ScoredToken, int]]
) -> list[ScoredDelta]:
    """Release each event with a token by which it is complete, or later."""
    told, at, num_characters = [], 0, 0
    for number, (one, known) in enumerate(tokens):
        released = []
        while at < len(events) and num_characters + len(events[at].source) <= known:
            if number < len(tokens) - 1 and rng.random() < 0.2:
                break  # held back
            num_characters += len(events[at].source)
            released.append(events[at])
            at += 1
        told.append(ScoredDelta(0, "", 1, None, events=tuple(released), scores=(one,)))
    return told


def test_tokens_of_any_output() -> None:
    """A block has exactly the tokens that complete a character of its text, or are part of one, each in one block."""
    for seed in range(400):
        rng = random.Random(seed)
        events = draw_events(rng)
        output = "".join(event.source for event in events)
        tokens = draw_tokens(rng, output)
        if not tokens:
            continue
        with_reasoning = rng.random() < 0.5
        transcript = Transcript(Tally(), with_reasoning, text_scores=TextScores(with_reasoning=with_reasoning))
        transcript.consume(list(deltas(rng, events, tokens)))
        scores = transcript.text_scores
        assert scores is not None
        blocks = [str(block.text) for block in transcript.content(0).blocks if isinstance(block, TextBlock)]
        # The block of each character of the output, None outside of texts.
        owners: list[int | None] = []
        number, is_open = -1, False
        for event in events:
            if isinstance(event, TextDelta):
                number += bool(event.text) and not is_open
                is_open = is_open or bool(event.text)
            elif not isinstance(event, Markup) and (
                not isinstance(event, ReasoningDelta) or (with_reasoning and event.text)
            ):
                is_open = False
            owners += [number if isinstance(event, TextDelta) else None] * len(event.source)
        expected: list[list[int]] = [[] for _ in blocks]
        for one, known in tokens:
            found = [owner for owner in owners[one.offset : max(known, one.offset + 1)] if owner is not None]
            if found:
                expected[found[0]].append(one.token_id)
        assert texts_of(scores, len(blocks)) == expected, seed


def test_hidden_tokens() -> None:
    """Special tokens that are not shown, within and around a text, are no part of it; halves of characters are."""
    scores = TextScores()
    plain = [
        (b"<think>", 0, (Markup(""),)), (b"hm", 0, (ReasoningDelta("hm"),)), (b"</think>", 2, (Markup(""),)),
        (b"\xc3", 2, ()), (b"\xa9 a", 2, (TextDelta("é a"),)), (b"<pad>", 5, ()), (b"b", 5, (TextDelta("b"),)),
        (b"<call>", 6, (Markup(""),)), (b"f", 6, (CallBegin(0, "f", "f"),)),
    ]  # fmt: skip
    for number, (utf8, offset, events) in enumerate(plain):
        scores.add(ScoredDelta(0, "", 1, None, events=events, scores=(token(number, utf8, offset),)))
    scores.add(ScoredDelta(0, "", 1, None, stop_token_id=9, scores=(token(9, b"<end>", 7),)))
    assert texts_of(scores, 1) == [[3, 4, 6]]


def test_cut_by_a_stop_string() -> None:
    """Tokens of a stop string that is not shown are no part of the text; half of one that is, is."""
    scores = TextScores()
    for number, (utf8, offset, text) in enumerate(((b"ab", 0, "a"), (b"c", 2, ""), (b"d", 3, ""))):
        scores.add(ScoredDelta(0, text, 1, None, scores=(token(number, utf8, offset),)))
    assert texts_of(scores, 1) == [[0]]
