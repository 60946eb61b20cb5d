"""Outputs become the same events however they are cut, lose no character, and are read as transformers' parser does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from quipu.actors.detokenizer.response_parsing.shipped_templates import REASONING, TOOL_CALLS
from tests.parsed_outputs import TOOLS, Parsed, parse, render_calls, template_of

FAMILIES = sorted(set(TOOL_CALLS) - {"qwen3_xml", "llama4_json"})
"""All formats, without aliases."""
THINKING = {name: template_of(name, "qwen3") for name in FAMILIES}

WORDS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<function=", "<parameter=count>", "\n", " ",
    "<parameter=text>", "</parameter>", "</function>", "12", "null", '{"name": "f", "arguments": ', '{"name"', '"', "x",
    "{", "}", "[", "]", "\\", ",", ":", ";", "f", "get_weather", "[TOOL_CALLS]", "[ARGS]", "functools[", '<|"|>', "<",
    "<|start|>assistant", "<|channel|>", "commentary", "analysis", " to=functions.f", "<|message|>", "<|end|>",
    "<|tool_call>call:f", "<tool_call|>", "<|python_tag|>", "<|tool_call|>", "<|im_end|>", "\uff5c>",
]  # fmt: skip
OUTPUTS = st.lists(st.sampled_from(WORDS), max_size=25).map("".join)

TEXTS = st.text(alphabet=st.sampled_from('ab {}[]":,\\\n<>é'), max_size=12)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(-99, 10**20),
        "ratio": st.integers(-99, 99) | st.floats(-1e6, 1e6),
        "flag": st.booleans(),
        "maybe": st.none() | TEXTS.filter(lambda text: text.strip() not in ("null", "None")),
        "things": st.lists(st.integers(0, 9) | TEXTS, max_size=3),
        "options": st.dictionaries(st.sampled_from("ab"), TEXTS | st.integers(0, 9), max_size=2),
    },
)
CALLS = st.lists(st.tuples(st.just("f"), ARGUMENTS) | st.just(("get_weather", {})), min_size=1, max_size=3)


def cut(output: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(output[at : at + size])
        at += size
    return [*pieces, output[at:]]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25)
@given(output=OUTPUTS, sizes=st.lists(st.integers(0, 6), max_size=60))
def test_any_output_however_cut(family: str, output: str, sizes: list[int]) -> None:
    """Any output gives the same events whole, character by character, and cut anywhere; no character is lost."""
    whole = parse(THINKING[family], [output])
    assert parse(THINKING[family], output).events == whole.events
    assert parse(THINKING[family], cut(output, sizes)).events == whole.events


SPECIAL_TEXTS = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "</s>"]
SPECIAL = template_of("mistral", "mistral", {text: at for at, text in enumerate(SPECIAL_TEXTS)})
TOKENS = st.lists(
    st.sampled_from([*WORDS, '[{"name": "f"', ', "arguments": {"a": 1}}', "f"])
    | st.integers(0, len(SPECIAL_TEXTS) - 1),
    max_size=20,
)


@given(tokens=TOKENS)
def test_any_tokens(tokens: list[str | int]) -> None:
    """With special tokens, no character is lost, and nothing depends on how the text between them is cut."""
    for is_shown in (False, True):
        shown = [token if isinstance(token, str) else (token, SPECIAL_TEXTS[token] * is_shown) for token in tokens]
        chars = [part for token in shown for part in (token if isinstance(token, str) else [token])]
        assert parse(SPECIAL, chars).events == parse(SPECIAL, shown).events


TOOL_SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": list(one)} for key, one in types.items()}},
        },
    }
    for name, types in TOOLS.items()
]


def oracle(family: str, output: str, num: int = 0, each: bool = False) -> dict[str, Any]:
    """Return what transformers' parser reads in the output with the same template."""
    calls = dict(TOOL_CALLS[family]["fields"]["tool_calls"][num])
    calls.pop("is_bare", None)
    if each:
        function = {"name": "{name}", "arguments": "{arguments}"}
        calls |= {"transform": {"type": "function", "function": function}, "transform_each": True}
    spec = {
        "start_anchor": "<|start|>",
        "fields": {
            "tool_calls": calls,
            "reasoning_content": REASONING["qwen3"]["fields"]["reasoning_content"],
            "content": TOOL_CALLS[family]["fields"]["content"],
        },
    }
    parsed: dict[str, Any] = parse_response(output, spec, prefix="", tools=TOOL_SCHEMAS)
    return parsed


def check(parsed: Parsed, message: dict[str, Any]) -> None:
    assert parsed.text.strip() == message.get("content", "")
    assert parsed.reasoning == message.get("reasoning_content", "")
    calls = message.get("tool_calls", [])
    functions = [one["function"] for call in calls for one in (call if isinstance(call, list) else [call])]
    expected = [(function["name"], function["arguments"]) for function in functions]
    assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == expected
    assert parsed.num_ended == len(expected)
    assert parsed.open_call is None


PLAIN_TEXT = st.sampled_from(["", "Hello.", "a < b", "so: {1}\n\nx"])
SPACE = st.sampled_from(["", "\n", "\n\n", " "])
FAMILY = [
    ("hermes", 0, False), ("qwen3_coder", 0, False), ("deepseek_v3", 0, False), ("deepseek_v31", 0, False),
    ("gemma4", 0, False), ("functiongemma", 0, False), ("phi4_mini_json", 1, True), ("granite", 0, True),
    ("mistral", 0, True), ("openai", 0, False),
]  # fmt: skip


@pytest.mark.parametrize(("family", "number", "each"), FAMILY)
@settings(max_examples=25)
@given(thought=PLAIN_TEXT, text=PLAIN_TEXT, calls=CALLS, space=SPACE)
def test_well_formed_outputs(
    family: str, number: int, each: bool, thought: str, text: str, calls: list[Any], space: str
) -> None:
    """Reasoning, text and calls are what transformers' parser reads with the same template."""
    reasoning = f"<think>{space}{thought}{space}</think>{space}" if thought else ""
    output = f"{reasoning}{text}{space}{render_calls(family, calls)}"
    check(parse(THINKING[family], output), oracle(family, output, number, each))


@settings(max_examples=25)
@given(calls=CALLS)
def test_llama_calls(calls: list[Any]) -> None:
    """Several calls are read as such after one marker, and without any."""
    output = render_calls("llama3_json", calls)
    for one in (output, output.removeprefix("<|python_tag|>")):
        parsed = parse(THINKING["llama3_json"], one)
        assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == calls
        assert parsed.text == ""
