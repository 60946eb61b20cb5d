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

from bench.body_parts import (
    ARGUMENTS,
    BREAKPOINTS,
    CACHE_TTL,
    CALLED,
    CHAT,
    CHAT_CALL,
    CHAT_TOOL,
    COHERE_RERANK,
    COMPACT,
    COMPLETIONS,
    CONVERSATIONS,
    COUNT,
    DETOKENIZE,
    EMBEDDINGS,
    FUNCTION,
    GENERATE,
    ID,
    INFILL,
    INPUT_TOKENS,
    JUNK,
    LAST_TOKEN,
    LLAMA,
    LOAD,
    LOOKUP,
    MESSAGES,
    MODEL,
    OBJECT,
    PART,
    RENDER,
    RERANK,
    RESPONSE_TOOL,
    RESPONSES,
    SCHEMA,
    SCORE,
    TEXT,
    TOKEN,
    TOKENIZE,
    TOKENS,
    TOOL_CHOICE,
    UNLOAD,
    mostly,
)
from bench.grammar_bodies import GRAMMARS
from quipu.actors.config.declarations import SamplingField
from quipu.actors.messages.sampling import SAMPLING_FIELDS

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
    "n": mostly(st.integers(1, 4), st.sampled_from([0, 16, 128, 129])),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "response_format": mostly(st.just({"type": "text"}), JUNK),
}
ADMISSION: Mapping[str, Strategy[Any]] = {
    "priority": mostly(st.just(0), st.integers(-2, 2)),
    "truncate_prompt_tokens": mostly(st.none(), st.integers(-2, 30)),
    "truncation_side": mostly(st.sampled_from(["left", "right"]), JUNK),
    "cache_salt": st.text(max_size=5) | st.just("s" * 257),
}
FOREIGN: Mapping[str, Strategy[Any]] = {
    "typical_p": mostly(st.just(1.0), JUNK),
    "repeat_last_n": mostly(st.just(-1), JUNK),
    "options": mostly(st.fixed_dictionaries({}, optional={"num_ctx": st.integers()}), OBJECT),
    "keep_alive": JUNK,
}
"""Of other servers."""
CACHING: Mapping[str, Strategy[Any]] = {
    "prompt_cache_options": mostly(
        st.fixed_dictionaries(
            {},
            optional={
                "mode": mostly(st.sampled_from(["implicit", "explicit"]), JUNK),
                "prewarm": mostly(st.booleans(), JUNK),
                "ttl": CACHE_TTL,
            },
        ),
        JUNK,
    ),
    "prompt_cache_retention": mostly(st.sampled_from(["in_memory", "24h"]), JUNK),
}
AFFINITY: Mapping[str, Strategy[Any]] = {
    **CACHING,
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
PREDICTED = st.fixed_dictionaries({"type": st.just("text"), "text": TEXT})
PREDICTION = st.fixed_dictionaries(
    {"type": mostly(st.just("content"), JUNK), "content": TEXT | mostly(st.lists(PREDICTED, max_size=3), JUNK)}
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
                    {"type": mostly(st.sampled_from(["input_text", "output_text"]), st.just("x")), "text": TEXT},
                    optional={**BREAKPOINTS},
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
    st.fixed_dictionaries({"type": st.sampled_from(["web_search_call", "tool_search_call", "compaction_trigger"])}),
    st.fixed_dictionaries(
        {"type": st.just("reasoning")},
        optional={
            "content": st.lists(st.fixed_dictionaries({"type": st.just("reasoning_text"), "text": TEXT}), max_size=2),
            "summary": mostly(st.just([{"type": "summary_text", "text": "So."}]), JUNK),
            "encrypted_content": mostly(TEXT, JUNK),
        },
    ),
)
_SEALED = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["compaction", "compaction_summary"]),
        "encrypted_content": mostly(st.text("AQab-_=", max_size=200), JUNK),
    }
)
"""Never readable: each server has its own key."""
_SCORES: Mapping[str, Strategy[Any]] = {
    "logprobs": mostly(st.integers(0, 20) | st.booleans(), st.sampled_from([-1, 21])),
    "prompt_logprobs": mostly(st.integers(0, 20) | st.just(False), st.sampled_from([-1, 21])),
    "echo": st.booleans(),
    "top_logprobs": st.integers(-1, 21),
    "return_tokens_as_token_ids": st.booleans(),
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
    "chat_template_kwargs": OBJECT,
    "cache_control": MARK,
    "metadata": OBJECT | st.fixed_dictionaries({"user_id": mostly(TEXT, JUNK)}),
}

_ADAPTER = mostly(st.sampled_from(["one", "two", "three"]), st.sampled_from([MODEL, "", "a/../b", "x" * 200]))
_ADAPTER_PATH = mostly(
    st.sampled_from(["first", "second", "first/."]),
    st.sampled_from(["", ".", "..", "/etc", "nowhere", "empty", "first/adapter_config.json", "\0", "x/" * 3000]),
)

_GENERATE_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
_NOT_OF_GENERATE = frozenset({"allowed_token_ids", "bad_words", "response_format"})
SAMPLING_PARAMS = st.fixed_dictionaries(
    {"max_new_tokens": MAX_TOKENS},
    optional={
        **{
            _GENERATE_NAMES.get(name, name): values
            for name, values in {**SAMPLING, **CHOICES}.items()
            if name not in _NOT_OF_GENERATE
        },
        "stop_regex": mostly(st.just(""), JUNK),
        "json_schema": SCHEMA,
        "max_tokens": JUNK,
    },
)
_POOLED = {**ADMISSION, **FOREIGN, **AFFINITY, "return_cached_tokens_details": st.booleans()}
REQUIRED: Mapping[str, Mapping[str, Strategy[Any]]] = {
    COMPLETIONS: {
        "prompt": TEXT | TOKENS | st.lists(TEXT, min_size=1, max_size=3) | st.lists(TOKENS, min_size=1, max_size=3)
    },
    CHAT: {"messages": mostly(st.lists(CHAT_MESSAGE, min_size=1, max_size=4) | CHAT_TURNS, st.just([]))},
    RESPONSES: {"input": TEXT | st.lists(ITEM, max_size=5)},
    COMPACT: {"input": mostly(TEXT | st.lists(ITEM, max_size=5), st.lists(_SEALED | ITEM, max_size=5))},
    MESSAGES: {"messages": mostly(st.lists(ANTHROPIC_MESSAGE, min_size=1, max_size=4) | TOOL_TURNS, st.just([]))},
    COUNT: {"messages": mostly(st.lists(ANTHROPIC_MESSAGE, min_size=1, max_size=4) | TOOL_TURNS, st.just([]))},
    LOAD: {"lora_name": _ADAPTER, "lora_path": _ADAPTER_PATH},
    UNLOAD: {"lora_name": _ADAPTER},
    CONVERSATIONS: {"items": mostly(st.lists(ITEM, max_size=5), JUNK)},
    TOKENIZE: {"prompt": mostly(TEXT, st.none()), "messages": mostly(st.none(), CHAT_TURNS)},
    DETOKENIZE: {"tokens": TOKENS},
    LLAMA: {
        "prompt": TEXT
        | TOKENS
        | st.lists(TEXT | TOKEN, min_size=1, max_size=4)
        | st.lists(TEXT | TOKENS | st.lists(TEXT | TOKEN, max_size=3), min_size=1, max_size=3)
    },
    INFILL: {"input_prefix": TEXT, "input_suffix": TEXT},
    GENERATE: {"text": TEXT | st.lists(TEXT, min_size=1, max_size=3)},
    EMBEDDINGS: {
        "input": TEXT | TOKENS | st.lists(TEXT, min_size=1, max_size=3) | st.lists(TOKENS, min_size=1, max_size=3)
    },
    SCORE: {"text_1": TEXT | st.lists(TEXT, min_size=1, max_size=2), "text_2": TEXT | st.lists(TEXT, max_size=3)},
    RERANK: {"query": TEXT, "documents": st.lists(TEXT | st.fixed_dictionaries({"text": TEXT}), max_size=3)},
}
_OF_LLAMA: Mapping[str, Strategy[Any]] = {
    **{name: values for name, values in SAMPLING.items() if name not in _NOT_OF_GENERATE},
    **ADMISSION,
    **FOREIGN,
    "stop": CHOICES["stop"],
    "n_cmpl": CHOICES["n"],
    "repeat_penalty": mostly(st.sampled_from([1, 1.5]), JUNK),
    "n_probs": mostly(st.integers(0, 20), st.sampled_from([-1, 21])),
    "json_schema": SCHEMA,
    "return_tokens": st.booleans(),
    "cache_prompt": mostly(st.booleans(), JUNK),
    "stream": st.booleans(),
}
OPTIONAL: Mapping[str, Mapping[str, Strategy[Any]]] = {
    COMPLETIONS: {
        **SAMPLING,
        **CHOICES,
        **ADMISSION,
        **FOREIGN,
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
        **FOREIGN,
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
        "store": mostly(st.booleans(), JUNK),
        "metadata": mostly(st.dictionaries(TEXT, TEXT, max_size=3), JUNK),
        "documents": mostly(st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=2), JUNK),
        "prediction": mostly(PREDICTION, JUNK),
        "reasoning_effort": EFFORT,
        "return_token_ids": st.booleans(),
    },
    CONVERSATIONS: {"metadata": mostly(st.dictionaries(TEXT, TEXT, max_size=3), JUNK)},
    RESPONSES: {
        **SAMPLING,
        **CHOICES,
        **ADMISSION,
        **FOREIGN,
        **AFFINITY,
        **DELIVERY,
        **TEMPLATE,
        "instructions": TEXT,
        "metadata": OBJECT,
        "include": mostly(st.just([]) | st.just(["message.output_text.logprobs"]), JUNK),
        "top_logprobs": st.integers(-1, 21),
        "text": mostly(st.sampled_from([{"format": {"type": "text"}}, {"verbosity": "low"}]), JUNK),
        "client_metadata": mostly(OBJECT, JUNK),
        "max_tool_calls": mostly(st.integers(0, 3), JUNK),
        "safety_identifier": mostly(TEXT, JUNK),
        "service_tier": mostly(st.just("auto"), JUNK),
        **_REASONING,
        **_CALLS,
        "tools": mostly(st.lists(RESPONSE_TOOL, max_size=3), JUNK),
        "reasoning": mostly(st.fixed_dictionaries({}, optional={"effort": EFFORT, "summary": JUNK}), JUNK),
        "store": mostly(st.booleans(), JUNK),
        "background": mostly(st.booleans(), JUNK),
        "conversation": mostly(st.just("conv_none") | st.fixed_dictionaries({"id": TEXT}), JUNK),
        "previous_response_id": mostly(st.just("resp_none"), JUNK),
        "truncation": mostly(st.just("disabled"), st.just("auto")),
    },
    COMPACT: {
        **ADMISSION,
        **FOREIGN,
        **AFFINITY,
        "instructions": TEXT,
        "tools": mostly(st.lists(RESPONSE_TOOL, max_size=3), JUNK),
        "reasoning": mostly(st.fixed_dictionaries({}, optional={"effort": EFFORT}), JUNK),
        "text": mostly(st.just({"verbosity": "low"}), JUNK),
        "previous_response_id": mostly(st.just("resp_none"), JUNK),
        "return_cached_tokens_details": st.booleans(),
        "stream": mostly(st.just(False), st.just(True)),
        "max_output_tokens": JUNK,
    },
    MESSAGES: {
        **_ANTHROPIC_PROMPT,
        "stream": st.booleans(),
        "stop_sequences": mostly(st.lists(st.text(min_size=1, max_size=5), max_size=4), JUNK),
        **{field.name: SAMPLING[field.name] for field in SAMPLING_FIELDS if MESSAGES in field.apis},
        **ADMISSION,
        **FOREIGN,
        "container": mostly(st.none(), JUNK),
    },
    COUNT: _ANTHROPIC_PROMPT,
    LOAD: {"load_inplace": mostly(st.booleans(), JUNK)},
    UNLOAD: {"lora_int_id": JUNK},
    TOKENIZE: {
        **TEMPLATE,
        "add_special_tokens": mostly(st.booleans(), JUNK),
        "return_token_strs": mostly(st.booleans(), JUNK),
        "continue_final_message": st.booleans(),
    },
    DETOKENIZE: {"skip_special_tokens": JUNK},
    LLAMA: _OF_LLAMA,
    INFILL: {**_OF_LLAMA, "prompt": TEXT},
    GENERATE: {
        **ADMISSION,
        "sampling_params": mostly(SAMPLING_PARAMS, JUNK),
        "return_logprob": st.booleans(),
        "logprob_start_len": st.integers(-2, 9),
        "top_logprobs_num": mostly(st.integers(0, 20), st.sampled_from([-1, 21])),
        "return_text_in_logprobs": st.booleans(),
        "return_prompt_token_ids": st.booleans(),
        "stream": st.booleans(),
        "rid": JUNK,
    },
    EMBEDDINGS: {
        **_POOLED,
        "dimensions": mostly(st.integers(1, 16), st.integers(-1, 20)),
        "encoding_format": mostly(st.sampled_from(["float", "base64"]), JUNK),
    },
    SCORE: {**_POOLED, "instruction": TEXT},
    RERANK: {
        **_POOLED,
        "instruction": TEXT,
        "top_n": mostly(st.integers(0, 4), JUNK),
        "return_documents": mostly(st.booleans(), JUNK),
    },
}
LIMIT = {
    LLAMA: "n_predict",
    INFILL: "n_predict",
    COMPLETIONS: "max_tokens",
    CHAT: "max_tokens",
    RESPONSES: "max_output_tokens",
    MESSAGES: "max_tokens",
}

SAME_BODIES = {INPUT_TOKENS: RESPONSES, RENDER: CHAT, COHERE_RERANK: RERANK}
"""Endpoints that read what others read."""


@st.composite
def bodies(draw: st.DrawFn, endpoint: str) -> bytes:
    """Draw the body of one request."""
    if endpoint in SAME_BODIES:
        return draw(bodies(SAME_BODIES[endpoint]))
    if endpoint == LOOKUP:
        url = draw(st.sampled_from([url for url in LIMIT if url not in (LLAMA, INFILL)]))
        told = draw(mostly(st.just(url), JUNK))
        prefetch = draw(
            st.sampled_from([b"", b', "prefetch": true', b', "prefetch": %b' % json.dumps(draw(JUNK)).encode()])
        )
        return b'{"url": %b, "body": %b%b}' % (json.dumps(told).encode(), draw(bodies(url)), prefetch)
    body: dict[str, Any] = {"model": MODEL}
    if endpoint in LIMIT:
        body[LIMIT[endpoint]] = draw(MAX_TOKENS)
    optional = OPTIONAL[endpoint]
    names = draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True))
    for name, value in {**REQUIRED[endpoint], **{name: optional[name] for name in names}}.items():
        body[name] = draw(mostly(value, JUNK))
    if endpoint == GENERATE and draw(st.booleans()):
        del body["text"]
        body["input_ids"] = draw(mostly(TOKENS | st.lists(TOKENS, min_size=1, max_size=3), JUNK))
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


ENDPOINTS = (
    COMPLETIONS,
    CHAT,
    RESPONSES,
    MESSAGES,
    COUNT,
    INPUT_TOKENS,
    COMPACT,
    CONVERSATIONS,
    LOOKUP,
    LOAD,
    UNLOAD,
    TOKENIZE,
    DETOKENIZE,
    RENDER,
    GENERATE,
    LLAMA,
    INFILL,
)
POOLED = (EMBEDDINGS, SCORE, RERANK, COHERE_RERANK)
"""Those of servers that were started to embed."""
