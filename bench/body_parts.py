"""Parts of random request bodies that several fields have: texts, tokens, schemas, tools, and what is none of them.

Hypothesis strategies for `bodies.py` and `grammar_bodies.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT, LOOKUP = "/v1/messages", "/v1/messages/count_tokens", "/v1/cache/lookup"
CONVERSATIONS = "/v1/conversations"
INPUT_TOKENS, COMPACT = "/v1/responses/input_tokens", "/v1/responses/compact"
TOKENIZE, DETOKENIZE, RENDER = "/tokenize", "/detokenize", "/v1/chat/completions/render"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
GENERATE, LLAMA, INFILL = "/generate", "/completion", "/infill"
EMBEDDINGS, SCORE = "/v1/embeddings", "/v1/score"
RERANK, COHERE_RERANK = "/v1/rerank", "/v2/rerank"
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
CACHE_TTL = mostly(st.sampled_from(["5m", "30m", "1h", "12h"]), st.sampled_from(["1m", "x", 5]))
BREAKPOINTS: Mapping[str, Strategy[Any]] = {
    "prompt_cache_breakpoint": mostly(
        st.fixed_dictionaries({"mode": mostly(st.just("explicit"), st.just("x"))}, optional={"ttl": CACHE_TTL}), JUNK
    )
}
PART = st.fixed_dictionaries(
    {"type": mostly(st.just("text"), st.just("image_url")), "text": TEXT}, optional={**BREAKPOINTS}
)
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
