"""The messages of an output of gpt-oss become reasoning, text and calls, by their channels."""

from __future__ import annotations

import re

import pytest

from quipu.actors.detokenizer.response_parsing.response_parser import ResponseParser
from quipu.actors.messages.output import ArgumentsDelta, TextDelta
from tests.parsed_outputs import Token, parse, template_of

NAMES = ("start", "end", "message", "channel", "constrain", "return", "call")
IDS = {f"<|{name}|>": 200 + number for number, name in enumerate(NAMES)}
HARMONY = template_of("openai", "openai_gptoss", IDS)
PROMPT = [(IDS["<|start|>"], ""), (10, "assistant")]

THOUGHT = "<|channel|>analysis<|message|>I need the weather.<|end|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
ROLE_FIRST = ' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
FINAL = "<|channel|>final<|message|>Sunny, 3 < 4.<|return|>"
PREAMBLE = "<|channel|>commentary<|message|>I will look.<|end|>"
START = "<|start|>assistant"


def tokens_of(output: str) -> list[Token]:
    """Return an output's tokens: special ones, whose text is hidden, and single characters."""
    parts = re.split(rf"({'|'.join(map(re.escape, IDS))})", output)
    return [token for part in parts for token in ([(IDS[part], "")] if part in IDS else part)]


@pytest.mark.parametrize(
    ("output", "reasoning", "text", "calls"),
    [
        (THOUGHT + START + FINAL, "I need the weather.", "Sunny, 3 < 4.", 0),
        (FINAL, "", "Sunny, 3 < 4.", 0),
        (THOUGHT + START + CALL, "I need the weather.", "", 1),
        (THOUGHT + START + ROLE_FIRST, "I need the weather.", "", 1),
        (ROLE_FIRST, "", "", 1),
        (CALL.replace(" <|constrain|>json", ""), "", "", 1),
        (CALL.replace("<|constrain|>", ""), "", "", 1),
        (CALL.replace("commentary", "analysis"), "", "", 1),
        (THOUGHT + START + PREAMBLE + START + CALL, "I need the weather.", "I will look.", 1),
        (THOUGHT + START + THOUGHT + START + FINAL, 2 * "I need the weather.", "Sunny, 3 < 4.", 0),
        (FINAL.replace("final", "final <|constrain|>json"), "", "Sunny, 3 < 4.", 0),
        (THOUGHT.removesuffix("<|end|>"), "I need the weather.", "", 0),
        (THOUGHT + START, "I need the weather.", "", 0),
        ("Text without a channel.", "", "Text without a channel.", 0),
    ],
)
def test_channels(output: str, reasoning: str, text: str, calls: int) -> None:
    """Analysis is reasoning, the other channels are text or, with a function as recipient, calls."""
    for template, tokens in ((HARMONY, tokens_of(output)), (template_of("openai", "openai_gptoss"), list(output))):
        parsed = parse(template, tokens, prompt=PROMPT)
        assert (parsed.reasoning, parsed.text) == (reasoning, text)
        assert parsed.calls == [("get_weather", '{"city": "Oslo"}')] * calls
        assert parsed.num_ended == calls


def test_each_half_alone() -> None:
    """Without the other half of the format no channel's name is shown, and analysis is text."""
    parsed = parse(template_of("openai", "none", IDS), tokens_of(THOUGHT + START + CALL))
    assert (parsed.text, len(parsed.calls)) == ("I need the weather.", 1)
    parsed = parse(template_of("none", "openai_gptoss", IDS), tokens_of(THOUGHT + START + FINAL))
    assert (parsed.reasoning, parsed.text) == ("I need the weather.", "Sunny, 3 < 4.")


def test_text_and_arguments_are_streamed() -> None:
    """A character of text, or of arguments, is sent with its token; reasoning tokens are counted."""
    parsed = parse(HARMONY, tokens_of(THOUGHT + START + FINAL))
    assert parsed.num_reasoning_tokens == len(tokens_of(THOUGHT))
    for output, kind in ((FINAL, TextDelta), (CALL, ArgumentsDelta)):
        first = re.split(r"(?<=<\|message\|>)", output)[0]
        parser = ResponseParser(HARMONY, {"get_weather": {}}, PROMPT)
        for token in tokens_of(first):
            parser.push(*(token if isinstance(token, tuple) else (10, token)))
        events = [event for char in output.removeprefix(first)[:3] for event in parser.push(10, char)]
        assert [type(event) for event in events if isinstance(event, kind)] == [kind] * 3


def test_typed_delimiters_are_text() -> None:
    """Delimiters that are ordinary characters, not special tokens, are text."""
    output = "Write <|channel|>final<|message|>."
    assert parse(HARMONY, [*tokens_of("<|channel|>final<|message|>"), *output]).text == output
