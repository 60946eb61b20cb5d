"""Reasoning is separated from the answer, wherever it begins, and its tokens are counted."""

from __future__ import annotations

import pytest

from quipu.actors.detokenizer.response_parsing.response_parser import ResponseParser
from quipu.actors.messages.output import Markup, ReasoningDelta, TextDelta
from tests.parsed_outputs import parse, template_of

THINK = template_of("hermes", "qwen3")
TURN, END = (1, "<|im_start|>"), (2, "<|im_end|>")
SPECIAL = template_of("mistral", "mistral", {"[THINK]": 5, "[/THINK]": 6, "[TOOL_CALLS]": 7, "[ARGS]": 8, "[INST]": 9})


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        (["assistant\n", "<think>", "\n"], True),
        (["assistant\n<think>\nLet me"], True),
        (["assistant\n", "<think>", "\n\n", "</think>", "\n\n"], False),
        (["assistant\n"], False),
        (["<th", "ink>"], True),
        ([], False),
    ],
)
def test_prompts_that_open_reasoning(prompt: list[str], is_open: bool) -> None:
    """The output begins inside reasoning if the prompt has opened it and not closed it."""
    tail = [(10, piece) for piece in prompt]
    parsed = parse(THINK, ["Hm", "</think>", "Yes"], prompt=tail)
    assert parsed.reasoning == ("Hm" if is_open else "")
    assert parsed.num_reasoning_tokens == (2 if is_open else 0)


def test_prompts_of_other_turns() -> None:
    """A tag in an earlier turn opens nothing."""
    template = template_of("hermes", "qwen3", {"<|im_start|>": 1, "<|im_end|>": 2})
    tail = [TURN, (10, "user\nwhat is <think>"), (2, ""), (10, "\n"), TURN, (10, "assistant\n")]
    parsed = parse(template, ["Hm"], prompt=tail)
    assert (parsed.text, parsed.reasoning) == ("Hm", "")


def test_white_space_around_delimiters() -> None:
    """White space next to a delimiter is markup; at the ends of the output it is content."""
    output = "\n <think>\n a b \n</think>\n\n c \n"
    assert parse(THINK, output).events == [
        Markup("\n <think>\n "),
        ReasoningDelta("a b"),
        Markup(" \n</think>\n\n "),
        TextDelta("c \n"),
    ]
    assert parse(THINK, " c ").events == [TextDelta(" c ")]
    assert parse(THINK, "\nc", prompt=[(1, "<think>\n\n</think>\n")]).events == [Markup("\n"), TextDelta("c")]


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        (["<think>", "a", "b", "</think>", "c"], 4),
        (["x", "<th", "ink>", "a", "</thi", "nk>", "c"], 5),
        (["x<think>a", "b", "c</think>d", "e"], 3),
        (["<think></think>", "c"], 1),
        (["<think>", "a", "", "b"], 4),
        (["a", "b"], 0),
        (["<thi", "x"], 0),
        (["\n", "<think>", "\n", "\n", "</think>", "\n"], 4),
        (["<think>a</think><think>b", "</think>"], 2),
        (["<think>", "a", "</think", "", "> b", "c"], 5),
        ([""], 0),
    ],
)
def test_counts_tokens(tokens: list[str], count: int) -> None:
    """Tokens from the opening delimiter to the closing one count, each once, however the delimiters are cut."""
    assert parse(THINK, tokens).num_reasoning_tokens == count


def test_counts_while_generating() -> None:
    """The count is right after each token, as soon as a delimiter is complete, and never falls."""
    parser = ResponseParser(THINK, {}, ())
    counts = []
    for piece in ("x", "<th", "ink>", "a", "</think", ">", "b", "</think>"):
        parser.push(10, piece)
        counts.append(parser.num_reasoning_tokens)
    assert counts == [0, 0, 2, 3, 4, 5, 5, 5]


def test_special_tokens_are_delimiters() -> None:
    """A delimiter that is a special token is recognized by its id, whether its text is shown or not."""
    for show in (False, True):
        shown = (lambda text: text) if show else (lambda text: "")
        tokens = [(5, shown("[THINK]")), "Hm", (6, shown("[/THINK]")), "\nYes", (7, shown("[TOOL_CALLS]")), "f"]
        parsed = parse(SPECIAL, [*tokens, (8, shown("[ARGS]")), '{"a": 1}'])
        assert (parsed.reasoning, parsed.text, parsed.calls) == ("Hm", "Yes", [("f", '{"a": 1}')])
        assert parsed.num_reasoning_tokens == 3
        assert parsed.markup == shown("[THINK]") + shown("[/THINK]") + "\n"


def test_text_that_looks_like_special_tokens() -> None:
    """The same characters, typed as ordinary text, are text."""
    output = '[THINK]Hm[/THINK][TOOL_CALLS]f[ARGS]{"a": 1}'
    assert parse(SPECIAL, output).events == [TextDelta(output)]


def test_text_that_comes_with_a_special_token() -> None:
    """Text that the decoder releases together with a special token comes before that token."""
    assert parse(SPECIAL, [(5, ""), "a", (6, "b"), "c"]).reasoning == "ab"
    assert parse(SPECIAL, [(5, ""), "a", (6, "b[/THINK]"), "c"]).reasoning == "ab"


def test_special_tokens_in_malformed_openings() -> None:
    """A special token that opens no valid call is text if it is shown, and nothing otherwise."""
    assert parse(SPECIAL, [(7, ""), "no call"]).text == "no call"
    assert parse(SPECIAL, [(7, "[TOOL_CALLS]"), "no call"]).text == "[TOOL_CALLS]no call"


def test_special_tokens_inside_strings() -> None:
    """A closing delimiter that is a special token closes, even inside an unfinished string."""
    template = template_of("phi4_mini_json", "none", {"<|tool_call|>": 5, "<|/tool_call|>": 6})
    parsed = parse(template, [(5, ""), '[{"name": "f", "arguments": {"a": "b', (6, ""), "Bye"])
    assert (parsed.calls, parsed.num_ended, parsed.text) == ([("f", '{"a": "b')], 1, "Bye")


def test_tags_for_forcing_the_end() -> None:
    """The texts of the delimiters are known if there is exactly one of each."""
    assert THINK.reasoning_tags == ("<think>", "</think>")
    assert SPECIAL.reasoning_tags == ("[THINK]", "[/THINK]")
    assert template_of("hermes", "granite").reasoning_tags is None
    assert template_of("hermes").reasoning_tags is None


def test_plain_text_is_never_held_back() -> None:
    """Text is released with its token unless it may begin a delimiter."""
    parser = ResponseParser(THINK, {"f": {}}, ())
    for piece in ("Hello", " world", "!", " a > b", " 1", "é"):
        assert list(parser.push(1, piece)) == [TextDelta(piece)]
    assert list(parser.push(1, " a < b")) == [TextDelta(" a < b")]
    assert list(parser.push(1, " a <")) == [TextDelta(" a")]
    assert list(parser.push(1, "=")) == [TextDelta(" <=")]
