"""Random request bodies made of each endpoint's own fields: most of them valid, some nearly, some not at all.

Hypothesis strategies, used by the fuzz tests (`tests/faults/test_random_bodies.py`) and by `python -m bench.stalls
--fuzz`. A new field of an endpoint needs a line here; sampling fields are generated from their declarations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from quipu.actors.declarations import SamplingField
from quipu.actors.messages.sampling import SAMPLING_FIELDS

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MODEL = "demo"
MAX_NESTED = 1000


def _nested(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def mostly(right: Strategy[Any], wrong: Strategy[Any]) -> Strategy[Any]:
    """Draw from `wrong` about once in twenty times, otherwise from `right`.

    The strategies are not part of the description that Hypothesis makes, which would double with every level.
    """
    return st.integers(0, 19).flatmap(lambda drawn: wrong if drawn == 19 else right)


JUNK: Strategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**30, -1, 0, 1e308, -0.0, 0.5, 1e-320]),
    st.text(max_size=20),
    # a lone surrogate is not a character, but JSON can express it
    st.sampled_from(["", " ", "\x00", "\ud800", "a\udfffb", "\ufdd0", "\ufdd1", "\u2028", "{{ 7 * 7 }}", "<|im_end|>"]),
    st.builds(_nested, st.sampled_from([1, 5, 50, 300, 990, MAX_NESTED]), st.sampled_from(["list", "object"])),
    st.lists(st.none() | st.integers(-1, 5) | st.text(max_size=3), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(-1, 5) | st.text(max_size=5), max_size=3),
)
TEXT = st.one_of(
    st.text(min_size=1, max_size=60),
    mostly(st.just("Hello."), st.just("\ud83d") | st.just("")),
    st.sampled_from(["Hello.", "A quipu is a ledger of knotted cords.", " " * 300, "a" * 1000, "é漢😀" * 50]),
    st.builds(lambda piece, count: piece * count, st.text(min_size=1, max_size=5), st.sampled_from([1, 10, 100])),
)
LAST_TOKEN = 3071
"""The last of the demo's vocabulary, which is smaller than that of the tests' checkpoint."""
TOKEN = st.integers(0, LAST_TOKEN) | st.sampled_from([-1, LAST_TOKEN + 1, 4096, 2**40])
TOKENS = mostly(st.lists(st.integers(0, LAST_TOKEN), min_size=1, max_size=80), st.lists(TOKEN, max_size=5))
PART = st.fixed_dictionaries({"type": mostly(st.just("text"), st.just("image_url")), "text": TEXT})
ID = st.sampled_from(["c1", "c2", "c3", ""])
OBJECT: Strategy[Any] = st.dictionaries(st.text(max_size=8), JUNK, max_size=3)
TYPE = st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array", "text"])
REFERENCE = st.sampled_from(["#/$defs/a", "#/definitions/a", "#/$defs/none", "https://example.com"])
DECLARED = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "type": mostly(TYPE | st.lists(TYPE, max_size=3), JUNK),
            "enum": mostly(st.lists(JUNK, max_size=3), JUNK),
            "const": JUNK,
            "nullable": mostly(st.booleans(), JUNK),
            "$ref": mostly(REFERENCE, JUNK),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {}, optional={"anyOf": st.lists(inner, max_size=3), "oneOf": st.lists(inner, max_size=3), "items": inner}
    ),
    max_leaves=4,
)
DEFINITIONS = mostly(st.fixed_dictionaries({"a": DECLARED}), JUNK)
PROPERTIES = st.dictionaries(st.text(max_size=8), mostly(DECLARED, JUNK), max_size=3)
SCHEMA = st.fixed_dictionaries(
    {"type": st.just("object")},
    optional={
        "properties": mostly(PROPERTIES, JUNK),
        "required": JUNK,
        "description": TEXT,
        "$defs": DEFINITIONS,
        "definitions": DEFINITIONS,
    },
)
NAME = mostly(st.sampled_from(["look_up", "web.stop-now", "x" * 64]), st.sampled_from(["", "a b", "x" * 129]))
FUNCTION = st.fixed_dictionaries(
    {"name": NAME}, optional={"description": TEXT, "parameters": mostly(SCHEMA, JUNK), "strict": st.booleans()}
)
ARGUMENTS = OBJECT.map(json.dumps) | TEXT | st.just("[" * 2000)
CALLED = st.fixed_dictionaries({"name": NAME, "arguments": ARGUMENTS | OBJECT})
CHAT_CALL = st.fixed_dictionaries({"id": ID, "type": st.just("function"), "function": CALLED})
CHAT_TOOL = st.fixed_dictionaries({"type": mostly(st.just("function"), st.just("custom")), "function": FUNCTION})
FLAT_TOOL = st.builds(
    lambda kind, function: {"type": kind, **function}, st.sampled_from(["function", "custom"]), FUNCTION
)
RESPONSE_TOOL = st.one_of(
    FLAT_TOOL,
    st.fixed_dictionaries(
        {
            "type": st.just("custom"),
            "name": NAME,
            "format": mostly(st.just({"syntax": "lark", "definition": "x"}), JUNK),
        }
    ),
    st.fixed_dictionaries(
        {"type": st.just("namespace"), "name": NAME, "tools": mostly(st.lists(FLAT_TOOL, max_size=2), JUNK)}
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["web_search", "local_shell", "tool_search"])}, optional={"x": JUNK}
    ),
)
_LOOK_UP = {"type": "function", "name": "look_up"}
TOOL_CHOICE = mostly(
    st.sampled_from(
        [
            "auto",
            "none",
            "required",
            _LOOK_UP,
            {"type": "function", "function": _LOOK_UP},
            {"type": "custom", "name": "look_up"},
            *({"type": "allowed_tools", "mode": mode, "tools": [_LOOK_UP]} for mode in ("auto", "required")),
        ]
    ),
    st.sampled_from([{"type": "function", "name": "nobody"}, {"type": "allowed_tools"}]) | JUNK,
)
HELD = st.sampled_from(
    [
        {},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
        {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2},
        {"type": "string", "pattern": "^[A-F]{2,4}$"},
        {"$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        {"properties": {f"p{number}": {} for number in range(300)}},
        {"type": "object", "properties": {f"p{number}": {} for number in range(600)}},
        {"enum": [f"value {number}" for number in range(300)]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "string", "format": "klingon"},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"not": {}},
    ]
)
"""Schemas of formats: large and small ones, and some that are refused."""
GRAMMAR_SCHEMA = mostly(HELD | SCHEMA | DECLARED, JUNK)
PATTERN = mostly(st.sampled_from(["A+", "[a-z]{3}[0-9]*", r"(yes|no)\.", "(a?){50}b", ""]), TEXT | JUNK)
OPTIONS = mostly(st.lists(st.text(max_size=5), min_size=1, max_size=4), st.lists(JUNK, max_size=3) | JUNK)
SOURCE = mostly(
    st.sampled_from(
        [
            'start: "A" | %json {"type": "integer"}',
            'root ::= "A" | "(" root ")"',
            "start: /[A-Z]+/ | word\nword: start",
            'root ::= root "a"',
            "start: [",
        ]
    ),
    TEXT | JUNK,
)
_TAGS = st.lists(
    st.fixed_dictionaries(
        {"begin": st.sampled_from(["<a=1>", "<a=2>"]), "end": mostly(st.sampled_from(["</a>", ""]), JUNK)},
        optional={
            "schema": GRAMMAR_SCHEMA,
            "content": mostly(
                st.fixed_dictionaries({"type": st.just("json_schema"), "json_schema": GRAMMAR_SCHEMA})
                | st.sampled_from([{"type": "any_text"}, {"type": "const_string", "value": "AA"}]),
                JUNK,
            ),
        },
    ),
    min_size=1,
    max_size=3,
)
_TRIGGERS = mostly(st.sampled_from([["<a="], ["<a=1", "<a=2"], ["A", "<a="]]), st.just(["<", "<a"]) | JUNK)
STRUCTURAL_TAG = st.one_of(
    st.fixed_dictionaries({"type": st.just("structural_tag"), "structures": _TAGS, "triggers": _TRIGGERS}),
    st.fixed_dictionaries(
        {
            "type": st.just("structural_tag"),
            "format": mostly(
                st.fixed_dictionaries(
                    {"type": st.just("triggered_tags"), "triggers": _TRIGGERS, "tags": _TAGS},
                    optional={"at_least_one": st.booleans(), "stop_after_first": st.booleans()},
                )
                | st.fixed_dictionaries(
                    {"type": st.just("tags_with_separator"), "tags": _TAGS, "separator": st.just(",")}
                ),
                st.fixed_dictionaries({"type": st.sampled_from(["dispatch", "sequence", "or"]), "elements": _TAGS})
                | JUNK,
            ),
        }
    ),
)
CHAT_FORMAT = st.one_of(
    STRUCTURAL_TAG,
    st.just({"type": "json_object"}),
    st.fixed_dictionaries(
        {
            "type": st.just("json_schema"),
            "json_schema": mostly(
                st.fixed_dictionaries({"name": NAME, "schema": GRAMMAR_SCHEMA}, optional={"strict": st.booleans()}),
                JUNK,
            ),
        }
    ),
    st.fixed_dictionaries({"type": mostly(st.just("text"), JUNK)}),
)
FLAT_FORMAT = mostly(
    st.fixed_dictionaries({"type": st.just("json_schema"), "schema": GRAMMAR_SCHEMA, "name": NAME}),
    st.sampled_from([{"type": "json_object"}, {"type": "json_schema", "schema": {}}, {"type": "text"}]),
)
_GUIDED: Mapping[str, Strategy[Any]] = {
    "json": GRAMMAR_SCHEMA | GRAMMAR_SCHEMA.map(json.dumps),
    "regex": PATTERN,
    "choice": OPTIONS,
    "grammar": SOURCE,
}
_STRUCTURED = {**_GUIDED, "structural_tag": STRUCTURAL_TAG | STRUCTURAL_TAG.map(json.dumps)}
STRUCTURED = mostly(
    st.one_of(
        st.just({"json_object": True}), *(st.fixed_dictionaries({name: value}) for name, value in _STRUCTURED.items())
    ),
    st.fixed_dictionaries({}, optional={**_STRUCTURED, "whitespace_pattern": JUNK}),
)
_OPENAI_GRAMMARS: Mapping[str, Strategy[Any]] = {
    "response_format": CHAT_FORMAT,
    "structured_outputs": STRUCTURED,
    **{f"guided_{name}": value for name, value in _GUIDED.items()},
}
GRAMMARS: Mapping[str, Mapping[str, Strategy[Any]]] = {
    COMPLETIONS: _OPENAI_GRAMMARS,
    CHAT: _OPENAI_GRAMMARS,
    RESPONSES: {"text": st.fixed_dictionaries({"format": FLAT_FORMAT})},
    MESSAGES: {
        "output_format": FLAT_FORMAT,
        "output_config": st.fixed_dictionaries({"format": FLAT_FORMAT}),
    },
}
"""What the output of a request may have to look like, by endpoint. A quarter of the bodies has one of these."""
EFFORT = mostly(st.sampled_from(["none", "minimal", "low", "medium", "high", "xhigh", "max"]), JUNK)
BUDGET = mostly(st.sampled_from([-1, 0, 1, 5, 10**6]), JUNK)


def _numbers(field: SamplingField) -> Strategy[Any]:
    """Draw numbers within the bounds of a field, including its default, and a few outside them."""
    bounds = field.bounds
    low = next((limit for limit in (bounds.minimum, bounds.above) if limit is not None), -1)
    right, wrong = [field.default], [low - 1]
    (right if bounds.above is None else wrong).append(low)
    if bounds.maximum is not None:
        right.append(bounds.maximum)
        wrong.append(bounds.maximum + 1)
    if field.reader == "number":
        right.append(low + 0.3 * (2 if bounds.maximum is None else bounds.maximum - low))
    elif bounds.maximum is None:
        right += [1] if field.at_most_max_tokens else [1, 50, 10**6]
    return mostly(st.sampled_from(right), st.sampled_from(wrong))


_VALUES: Mapping[str, Strategy[Any]] = {
    "boolean": st.booleans(),
    "seed": st.integers(-5, 5) | st.sampled_from([2**63, 2**64, -(2**63)]),
    "biases": mostly(
        st.dictionaries(st.integers(0, LAST_TOKEN).map(str), st.floats(-100, 100), max_size=4),
        st.dictionaries(st.integers(-1, 4097).map(str) | st.text(max_size=3), st.floats(-101, 101), max_size=4),
    ),
    "some_token_ids": mostly(st.lists(st.integers(0, LAST_TOKEN), min_size=1, max_size=6), st.lists(TOKEN, max_size=6)),
    "token_ids": mostly(st.lists(st.integers(0, LAST_TOKEN), max_size=4), st.lists(TOKEN, max_size=4)),
    "words": st.lists(TEXT.map(lambda text: text[:300]), max_size=4),
}
"""By the parser that reads them (`web/api/sampling.py`)."""
SAMPLING: Mapping[str, Strategy[Any]] = {
    field.name: _VALUES[field.reader] if field.reader in _VALUES else _numbers(field) for field in SAMPLING_FIELDS
}
CHOICES: Mapping[str, Strategy[Any]] = {
    "stop": st.lists(st.text(min_size=1, max_size=5), max_size=5) | st.text(max_size=5) | st.just(["a" * 4096] * 16),
    "n": mostly(st.integers(1, 4), st.sampled_from([0, 16, 17])),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "response_format": mostly(st.just({"type": "text"}), JUNK),
}
ADMISSION: Mapping[str, Strategy[Any]] = {
    "priority": mostly(st.just(0), st.integers(-2, 2)),
    "cache_salt": st.text(max_size=5) | st.just("s" * 257),
}
AFFINITY: Mapping[str, Strategy[Any]] = {
    "prompt_cache_key": mostly(TEXT, JUNK),
    "user": mostly(TEXT, JUNK),
}
DELIVERY: Mapping[str, Strategy[Any]] = {
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "return_cached_tokens_details": st.booleans(),
    "user": st.text(max_size=5),
}
TEMPLATE: Mapping[str, Strategy[Any]] = {
    "chat_template_kwargs": OBJECT,
    "add_generation_prompt": st.booleans(),
}
MAX_TOKENS = mostly(st.integers(1, 6), st.sampled_from([0, -1, 40, 10**6]))
CHAT_MESSAGE = st.fixed_dictionaries(
    {
        "role": mostly(
            st.sampled_from(["user", "assistant", "system", "developer", "tool", "function"]), st.just("nobody")
        ),
        "content": TEXT | st.lists(PART, min_size=1, max_size=3),
    },
    optional={
        "name": TEXT,
        "tool_call_id": ID,
        "tool_calls": mostly(st.lists(CHAT_CALL, max_size=3), JUNK),
        "function_call": mostly(CALLED, JUNK),
        "reasoning_content": mostly(TEXT, JUNK),
        "reasoning": mostly(TEXT, JUNK),
    },
)
CHAT_TURNS = st.builds(
    lambda text, calls, result: [
        {"role": "user", "content": text},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *[{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls],
        {"role": "assistant", "function_call": calls[0]["function"]},
        {"role": "function", "name": "look_up", "content": result},
    ],
    TEXT,
    st.lists(CHAT_CALL, min_size=1, max_size=3),
    TEXT,
)
MARK = st.fixed_dictionaries(
    {"type": st.just("ephemeral")}, optional={"ttl": mostly(st.sampled_from(["5m", "1h"]), st.just("2h"))}
)
TEXT_BLOCK = st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}, optional={"cache_control": MARK})
BLOCK = st.one_of(
    TEXT_BLOCK,
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": TEXT}, optional={"signature": TEXT}),
    st.fixed_dictionaries({"type": st.just("redacted_thinking"), "data": TEXT}),
    st.fixed_dictionaries(
        {"type": st.just("tool_use"), "id": ID, "name": st.just("look_up"), "input": OBJECT},
        optional={"cache_control": MARK},
    ),
    st.fixed_dictionaries(
        {"type": st.just("tool_result"), "tool_use_id": ID, "content": TEXT | st.lists(PART, max_size=2)},
        optional={"is_error": st.booleans(), "cache_control": MARK},
    ),
    st.fixed_dictionaries({"type": st.just("image"), "source": JUNK}),
)
ANTHROPIC_MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": TEXT | st.lists(TEXT_BLOCK, min_size=1, max_size=3) | mostly(TEXT, st.lists(BLOCK, max_size=4)),
    }
)
TOOL_TURNS = st.builds(
    lambda text, block, result: [
        {"role": "user", "content": text},
        {"role": "assistant", "content": [block | {"id": "c1"}]},
        {"role": "user", "content": [result | {"tool_use_id": "c1"}]},
    ],
    TEXT,
    st.fixed_dictionaries({"type": st.just("tool_use"), "name": st.just("look_up"), "input": OBJECT}),
    st.fixed_dictionaries({"type": st.just("tool_result"), "content": TEXT}, optional={"cache_control": MARK}),
)
ANTHROPIC_TOOL = st.fixed_dictionaries(
    {"name": mostly(st.sampled_from(["look_up", "x" * 100]), st.just("")), "input_schema": SCHEMA},
    optional={"description": TEXT, "cache_control": MARK, "type": mostly(st.just("custom"), st.just("bash_20250124"))},
)
ITEM = st.one_of(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": TEXT
            | st.lists(
                st.fixed_dictionaries(
                    {"type": mostly(st.sampled_from(["input_text", "output_text"]), st.just("x")), "text": TEXT}
                ),
                max_size=3,
            ),
        },
        optional={"type": st.just("message")},
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("function_call"),
            "call_id": ID,
            "name": TEXT,
            "arguments": ARGUMENTS,
        },
        optional={"namespace": mostly(st.sampled_from(["functions", "mcp__git"]), JUNK)},
    ),
    st.fixed_dictionaries({"type": st.just("custom_tool_call"), "call_id": ID, "name": TEXT, "input": TEXT}),
    st.fixed_dictionaries({"type": st.just("local_shell_call"), "call_id": ID, "action": mostly(OBJECT, JUNK)}),
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["function_call_output", "custom_tool_call_output", "local_shell_call_output"]),
            "call_id": ID,
            "output": TEXT | st.just([]),
        }
    ),
    st.fixed_dictionaries({"type": st.just("additional_tools"), "tools": mostly(st.lists(RESPONSE_TOOL), JUNK)}),
    st.fixed_dictionaries({"type": st.sampled_from(["web_search_call", "tool_search_call", "compaction"])}),
    st.fixed_dictionaries(
        {"type": st.just("reasoning")},
        optional={
            "content": st.lists(st.fixed_dictionaries({"type": st.just("reasoning_text"), "text": TEXT}), max_size=2),
            "summary": mostly(st.just([{"type": "summary_text", "text": "So."}]), JUNK),
            "encrypted_content": mostly(TEXT, JUNK),
        },
    ),
)
_SCORES: Mapping[str, Strategy[Any]] = {
    "logprobs": mostly(st.integers(0, 20) | st.booleans(), st.sampled_from([-1, 21])),
    "prompt_logprobs": mostly(st.integers(0, 20) | st.just(False), st.sampled_from([-1, 21])),
    "echo": st.booleans(),
    "top_logprobs": st.integers(-1, 21),
}
_REASONING: Mapping[str, Strategy[Any]] = {
    "enable_thinking": mostly(st.booleans(), JUNK),
    "include_reasoning": st.booleans(),
    "thinking_token_budget": BUDGET,
}
_CALLS: Mapping[str, Strategy[Any]] = {
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": mostly(st.booleans(), JUNK),
}
_ANTHROPIC_PROMPT: Mapping[str, Strategy[Any]] = {
    "system": TEXT | st.lists(BLOCK, max_size=3),
    "tools": st.lists(ANTHROPIC_TOOL, max_size=3),
    "tool_choice": st.fixed_dictionaries(
        {"type": mostly(st.sampled_from(["auto", "none"]), st.sampled_from(["any", "tool", "some"]))},
        optional={"disable_parallel_tool_use": mostly(st.booleans(), JUNK)},
    ),
    "thinking": st.fixed_dictionaries(
        {"type": st.sampled_from(["enabled", "disabled", "adaptive"])}, optional={"budget_tokens": BUDGET}
    ),
    "output_config": st.fixed_dictionaries({}, optional={"effort": EFFORT}),
    "cache_control": MARK,
    "metadata": OBJECT | st.fixed_dictionaries({"user_id": mostly(TEXT, JUNK)}),
}

REQUIRED: Mapping[str, Mapping[str, Strategy[Any]]] = {
    COMPLETIONS: {
        "prompt": TEXT | TOKENS | st.lists(TEXT, min_size=1, max_size=3) | st.lists(TOKENS, min_size=1, max_size=3)
    },
    CHAT: {"messages": mostly(st.lists(CHAT_MESSAGE, min_size=1, max_size=4) | CHAT_TURNS, st.just([]))},
    RESPONSES: {"input": TEXT | st.lists(ITEM, max_size=5)},
    MESSAGES: {"messages": mostly(st.lists(ANTHROPIC_MESSAGE, min_size=1, max_size=4) | TOOL_TURNS, st.just([]))},
    COUNT: {"messages": mostly(st.lists(ANTHROPIC_MESSAGE, min_size=1, max_size=4) | TOOL_TURNS, st.just([]))},
}
OPTIONAL: Mapping[str, Mapping[str, Strategy[Any]]] = {
    COMPLETIONS: {
        **SAMPLING,
        **CHOICES,
        **ADMISSION,
        **AFFINITY,
        **DELIVERY,
        **_SCORES,
        "best_of": mostly(st.just(1), st.integers(0, 3)),
        "suffix": mostly(st.just(""), TEXT),
    },
    CHAT: {
        **SAMPLING,
        **CHOICES,
        **ADMISSION,
        **AFFINITY,
        **DELIVERY,
        **TEMPLATE,
        **_SCORES,
        **_REASONING,
        **_CALLS,
        "tools": mostly(st.lists(CHAT_TOOL, max_size=3, unique_by=lambda tool: tool["function"]["name"]), JUNK),
        "functions": mostly(st.lists(FUNCTION, max_size=2), JUNK),
        "function_call": mostly(st.sampled_from(["none", "auto"]), JUNK),
        "continue_final_message": st.booleans(),
        "documents": mostly(st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=2), JUNK),
        "reasoning_effort": EFFORT,
        "return_token_ids": st.booleans(),
    },
    RESPONSES: {
        **SAMPLING,
        **CHOICES,
        **ADMISSION,
        **AFFINITY,
        **DELIVERY,
        **TEMPLATE,
        "instructions": TEXT,
        "metadata": OBJECT,
        "include": mostly(st.just([]), JUNK),
        "text": mostly(st.sampled_from([{"format": {"type": "text"}}, {"verbosity": "low"}]), JUNK),
        "client_metadata": mostly(OBJECT, JUNK),
        "max_tool_calls": mostly(st.integers(0, 3), JUNK),
        "prompt_cache_options": mostly(st.just({}), JUNK),
        "safety_identifier": mostly(TEXT, JUNK),
        "service_tier": mostly(st.just("auto"), JUNK),
        **_REASONING,
        **_CALLS,
        "tools": mostly(st.lists(RESPONSE_TOOL, max_size=3), JUNK),
        "reasoning": mostly(st.fixed_dictionaries({}, optional={"effort": EFFORT, "summary": JUNK}), JUNK),
        "store": st.booleans(),
        "truncation": mostly(st.just("disabled"), st.just("auto")),
    },
    MESSAGES: {
        **_ANTHROPIC_PROMPT,
        "stream": st.booleans(),
        "stop_sequences": mostly(st.lists(st.text(min_size=1, max_size=5), max_size=4), JUNK),
        **{field.name: SAMPLING[field.name] for field in SAMPLING_FIELDS if MESSAGES in field.apis},
        **ADMISSION,
        "container": mostly(st.none(), JUNK),
    },
    COUNT: _ANTHROPIC_PROMPT,
}
LIMIT = {COMPLETIONS: "max_tokens", CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}


@st.composite
def bodies(draw: st.DrawFn, endpoint: str) -> bytes:
    """Draw the body of one request."""
    body: dict[str, Any] = {"model": MODEL}
    if endpoint in LIMIT:
        body[LIMIT[endpoint]] = draw(MAX_TOKENS)
    optional = OPTIONAL[endpoint]
    names = draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True))
    for name, value in {**REQUIRED[endpoint], **{name: optional[name] for name in names}}.items():
        body[name] = draw(mostly(value, JUNK))
    if endpoint in GRAMMARS and draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(sorted(GRAMMARS[endpoint])))
        body[name] = draw(mostly(GRAMMARS[endpoint][name], JUNK))
    if draw(st.integers(0, 30)) == 0:
        body[draw(st.text(max_size=10))] = draw(JUNK)
    data = json.dumps(body, ensure_ascii=True).encode()
    if draw(st.integers(0, 40)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 3)) :]
    return data


ENDPOINTS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, COUNT)
