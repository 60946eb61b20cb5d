"""The fields of completions, chat, responses and messages, those that are required and others.

Hypothesis strategies, of which `bodies.py` draws. A new field of these endpoints needs a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from bench.body_fields import ADMISSION, AFFINITY, BUDGET, CHOICES, DELIVERY, EFFORT, FOREIGN, SAMPLING, TEMPLATE
from bench.body_parts import (
    CHAT,
    CHAT_TOOL,
    COMPACT,
    COMPLETIONS,
    COUNT,
    FUNCTION,
    JUNK,
    MESSAGES,
    OBJECT,
    RESPONSE_TOOL,
    RESPONSES,
    SCHEMA,
    TEXT,
    TOKENS,
    TOOL_CHOICE,
    mostly,
)
from bench.history_bodies import ANTHROPIC_MESSAGE, BLOCK, CHAT_MESSAGE, CHAT_TURNS, ITEM, MARK, SEALED, TOOL_TURNS
from quipu.actors.messages.sampling import SAMPLING_FIELDS

PREDICTED = st.fixed_dictionaries({"type": st.just("text"), "text": TEXT})
PREDICTION = st.fixed_dictionaries(
    {"type": mostly(st.just("content"), JUNK), "content": TEXT | mostly(st.lists(PREDICTED, max_size=3), JUNK)}
)
ANTHROPIC_TOOL = st.fixed_dictionaries(
    {"name": mostly(st.sampled_from(["look_up", "x" * 100]), st.just("")), "input_schema": SCHEMA},
    optional={
        "description": TEXT,
        "cache_control": MARK,
        "type": mostly(st.just("custom"), st.just("bash_20250124")),
        "defer_loading": mostly(st.booleans(), JUNK),
    },
)
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
REQUIRED: Mapping[str, Mapping[str, Strategy[Any]]] = {
    COMPLETIONS: {
        "prompt": TEXT | TOKENS | st.lists(TEXT, min_size=1, max_size=3) | st.lists(TOKENS, min_size=1, max_size=3)
    },
    CHAT: {"messages": mostly(st.lists(CHAT_MESSAGE, min_size=1, max_size=4) | CHAT_TURNS, st.just([]))},
    RESPONSES: {"input": TEXT | st.lists(ITEM, max_size=5)},
    COMPACT: {"input": mostly(TEXT | st.lists(ITEM, max_size=5), st.lists(SEALED | ITEM, max_size=5))},
    MESSAGES: {"messages": mostly(st.lists(ANTHROPIC_MESSAGE, min_size=1, max_size=4) | TOOL_TURNS, st.just([]))},
    COUNT: {"messages": mostly(st.lists(ANTHROPIC_MESSAGE, min_size=1, max_size=4) | TOOL_TURNS, st.just([]))},
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
        "previous_response_id": mostly(st.sampled_from(["resp_{request}", "resp_none"]), JUNK),
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
        "previous_response_id": mostly(st.sampled_from(["resp_{request}", "resp_none"]), JUNK),
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
}
