"""Where a call begins and ends, what is sent of it, and which outputs are not calls but text."""

from __future__ import annotations

import json

import pytest

from quipu.actors.detokenizer.response_parsing.response_parser import ResponseParser
from quipu.actors.messages.output import ArgumentsDelta, CallBegin, CallEnd, TextDelta
from tests.parsed_outputs import TOOLS, parse, template_of

HERMES = template_of("hermes")
CODER = template_of("qwen3_coder")


@pytest.mark.parametrize(
    "output",
    [
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>nothing of the kind</tool_call>",
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>'.replace('"f"', '["f"]'),
        '<tool_call>{"arguments": {}}</tool_call>',
        "a <tool_call>\n<tool_call>\n</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"na',
        "<tool_",
        '<tool_call>{"arguments": {"text": "' + 5000 * "x" + '"}, "name": "f"}</tool_call>',
        "<tool_call>" + 5000 * " " + '{"name": "f"}</tool_call>',
    ],
)
def test_malformed_openings_are_text(output: str) -> None:
    """An opening that names no tool of the request, is not JSON, is cut or is too long is text, with its
    delimiters."""
    parsed = parse(HERMES, output)
    assert parsed.events == [TextDelta(output)]
    assert parsed.open_call is None


def test_unknown_names_in_opening_delimiters() -> None:
    """A call whose opening delimiter has a name that is not a tool's is text."""
    for family, output in (
        ("qwen3_coder", "a\n<tool_call>\n<function=g>\n<parameter=x>1</parameter>\n</function>\n</tool_call>"),
        ("mistral", '[TOOL_CALLS]g[ARGS]{"a": 1}'),
        ("gemma4", "<|tool_call>call:g{}<tool_call|>"),
    ):
        assert parse(template_of(family), output).events == [TextDelta(output)]


def test_calls_without_tools_are_text() -> None:
    """Without tools, a call is text."""
    output = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(HERMES, output, tools={}).events == [TextDelta(output)]


@pytest.mark.parametrize(
    "arguments",
    ["{}", '{"a": [1, {"b": "}"}]}', '"{\\"a\\": 1}"', "null", "[ ]", '{ "a" :\n1 }', '{"t": "</tool_call>"}', "12"],
)
@pytest.mark.parametrize(
    "form",
    [
        '<tool_call>{"name": "f", "arguments": %s}</tool_call>',
        '<tool_call>\n{ "name" : "f" ,\n"parameters" : %s }\n</tool_call>',
        '<tool_call>{"arguments": %s, "name": "f"}</tool_call>',
        '<tool_call>{"id": "x", "name": "f", "more": {"name": "g"}, "arguments": %s, "arguments": 1}</tool_call>',
    ],
)
def test_arguments_are_the_models_characters(form: str, arguments: str) -> None:
    """The joined argument texts are exactly what the model wrote, whatever surrounds it."""
    parsed = parse(HERMES, form % arguments)
    assert parsed.calls == [("f", arguments)]
    assert parsed.text == ""
    assert parsed.num_ended == 1


@pytest.mark.parametrize("end", ["}", "", "}}}"])
@pytest.mark.parametrize(
    "arguments", ['{"a": tru', "{'a': '}'", '{"a": "b}\n', '{"a": "b" "c"', '{"a": [1}', '{"a": "he said "hi"']
)
def test_malformed_arguments_end_at_the_delimiter(arguments: str, end: str) -> None:
    """A call with malformed arguments is still a call, is sent as written, and ends at the latest at its closing
    delimiter."""
    parsed = parse(HERMES, f'<tool_call>{{"name": "f", "arguments": {arguments}{end}</tool_call>\nBye')
    (call,) = parsed.calls
    assert call[0] == "f"
    assert call[1].startswith(arguments[:4])
    assert (parsed.text, parsed.num_ended, parsed.open_call) == ("Bye", 1, None)


def test_unfinished_string_before_the_delimiter() -> None:
    """A closing delimiter in a string counts if the output ends, or a line begins, right after it."""
    for rest in ("", "\nBye"):
        parsed = parse(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call>' + rest)
        assert parsed.calls == [("f", '{"a": "b}}')]
        assert parsed.num_ended == 1


def test_line_break_inside_a_string() -> None:
    """A string with a raw line break, which is malformed, does not hide the closing delimiter."""
    parsed = parse(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b}\n</tool_call> Bye')
    assert (parsed.calls, parsed.text) == ([("f", '{"a": "b}\n')], "Bye")


def test_cut_calls() -> None:
    """A cut call has no end, no brackets are added to it, and its index is known."""
    parsed = parse(HERMES, '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f", "arguments": {"a": [1, ')
    assert parsed.calls == [("f", "{}"), ("f", '{"a": [1, ')]
    assert (parsed.num_ended, parsed.open_call) == (1, 1)
    parsed = parse(CODER, "<tool_call><function=f><parameter=text>Hel")
    assert (parsed.calls, parsed.num_ended, parsed.open_call) == ([("f", '{"text": "Hel')], 0, 0)


def test_held_back_values_of_a_cut_call_are_sent() -> None:
    """A value that was held back because its type was not certain is sent when the output ends."""
    assert parse(CODER, "<tool_call><function=f><parameter=count>1").calls == [("f", '{"count": 1')]
    assert parse(CODER, '<tool_call><function=f><parameter=things>["a').calls == [("f", '{"things": "[\\"a')]


def test_calls_without_arguments() -> None:
    """A call without any arguments sends an empty object."""
    assert parse(HERMES, '<tool_call>{"name": "f"}</tool_call>').calls == [("f", "{}")]
    assert parse(HERMES, '<tool_call>{"name": "f"</tool_call>').calls == [("f", "{}")]
    assert parse(CODER, "<tool_call><function=f></function></tool_call>").calls == [("f", "{}")]
    assert parse(template_of("mistral"), "[TOOL_CALLS]f[ARGS]{}").calls == [("f", "{}")]


def test_text_around_calls() -> None:
    """White space between text and a call belongs to the markup; text between calls is text."""
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parsed = parse(HERMES, f"Look:\n\n{call}\nAnd:\n{call}\n{call}\nDone.\n")
    texts = [event.text for event in parsed.events if isinstance(event, TextDelta)]
    assert texts == ["Look:", "And:", "Done.\n"]
    assert len(parsed.calls) == parsed.num_ended == 3
    assert parse(HERMES, f"\n{call}\n").text == ""


def test_names_and_arguments_stream() -> None:
    """A call begins with the last quote of its name, and each character of an argument is sent at once."""
    parser = ResponseParser(HERMES, TOOLS, ())
    assert not parser.push(1, '<tool_call>{"name": "f')
    (begin,) = parser.push(1, '"')
    assert isinstance(begin, CallBegin)
    parser.push(1, ', "arguments": {"text": "')
    for char in "a<b":
        events = parser.push(1, char)
        assert [event.text for event in events] == ([] if char == "<" else ["<b" if char == "b" else char])
    assert CallEnd(0) in parser.push(1, '"}}')


def test_strings_of_tagged_calls_stream() -> None:
    """A string argument is sent as it arrives, a typed one once it is complete, and one of uncertain type as soon as
    its type is decided."""
    parser = ResponseParser(CODER, TOOLS, ())
    parser.push(1, "<tool_call><function=f>\n<parameter=text>\n")
    assert [e.text for e in parser.push(1, 'a"b') if isinstance(e, ArgumentsDelta)] == ['"a\\"b']
    parser.push(1, "</parameter><parameter=count>\n")
    assert not [e for e in parser.push(1, "12") if isinstance(e, ArgumentsDelta) and e.text]
    parser.push(1, "\n</parameter><parameter=maybe>\n")
    assert [e.text for e in parser.push(1, "nu")] == [""]
    assert [e.text for e in parser.push(1, "mbers") if isinstance(e, ArgumentsDelta)] == ['"numbers']


def test_types_of_tagged_calls() -> None:
    """Values get the types of the tool's schema if they can be read as such, and stay strings otherwise."""
    values = {
        "text": "12", "count": "12", "ratio": "1.50", "flag": "True", "maybe": "None", "things": '[1, "a"]',
        "options": '{"a": NaN}', "other": "12",
    }  # fmt: skip
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    ((_, arguments),) = parse(CODER, f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>").calls
    assert json.loads(arguments) == {
        "text": "12", "count": 12, "ratio": 1.5, "flag": True, "maybe": None, "things": [1, "a"],
        "options": '{"a": NaN}', "other": "12",
    }  # fmt: skip
    assert '"ratio": 1.50' in arguments


def test_indentation_of_tagged_values() -> None:
    """One line break around a value belongs to the markup, all other white space to the value."""
    output = "<tool_call><function=f><parameter=text>\n\n  def\n\n</parameter></function></tool_call>"
    assert json.loads(parse(CODER, output).calls[0][1]) == {"text": "\n  def\n"}


def test_bare_calls() -> None:
    """A JSON answer is a call only where an answer begins and only if its first key is one of a call's."""
    llama = template_of("llama3_json")
    assert parse(llama, '{"name": "f", "parameters": {"a": 1}}').calls == [("f", '{"a": 1}')]
    assert parse(llama, 'See {"name": "f", "parameters": {}}').calls == []
    call = '{"name": "f", "parameters": {"a": 1}}'
    for opening in ("", "<|python_tag|>", "<|python_start|><|python_end|>"):
        assert parse(template_of("llama4_json"), opening + call).calls == [("f", '{"a": 1}')]
    parser = ResponseParser(llama, TOOLS, ())
    assert "".join(event.source for event in parser.push(1, '{"city": "Pa')) == '{"city": "Pa'


def test_several_objects_in_one_pair_of_delimiters() -> None:
    """Each object of a list within one pair of delimiters is a call."""
    output = '<tool_call>[{"name": "f"}, {"name": "get_weather", "arguments": {}}]</tool_call> ok'
    parsed = parse(HERMES, output)
    assert parsed.calls == [("f", "{}"), ("get_weather", "{}")]
    assert parsed.text == "ok"


def test_delimiter_that_is_missing_or_cut() -> None:
    """A complete call ends with its JSON: text that follows is shown, but not a cut closing delimiter."""
    call = '<tool_call>{"name": "f"}'
    assert parse(HERMES, call + "\nDone").text == "Done"
    assert parse(HERMES, call + "\n</tool_c").text == ""
    assert parse(HERMES, call).num_ended == 1
