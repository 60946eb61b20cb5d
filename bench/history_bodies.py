"""What conversations are made of, in the messages, blocks and items of each API.

Hypothesis strategies, of which `bodies.py` draws. Items of responses may refer to stored ones: `{request}` in
an id stands for the end of the id of a response that was made before (`stored_bodies.py`).
"""

from __future__ import annotations

from hypothesis import strategies as st

from bench.body_parts import (
    ARGUMENTS,
    BREAKPOINTS,
    CALLED,
    CHAT_CALL,
    ID,
    JUNK,
    OBJECT,
    PART,
    RESPONSE_TOOL,
    TEXT,
    mostly,
)

IMAGE_DATA = mostly(
    st.just(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
    ),  # one pixel
    st.text("AQab/+=@", max_size=50),
)
IMAGE_URL = st.builds("data:image/png;base64,{}".format, IMAGE_DATA) | st.just("https://example.com/a.png")
SEEN_PART = st.fixed_dictionaries(
    {
        "type": st.just("image_url"),
        "image_url": mostly(
            st.fixed_dictionaries({"url": mostly(IMAGE_URL, JUNK)}, optional={"detail": st.just("low")}), JUNK
        ),
    },
    optional={**BREAKPOINTS},
)
CHAT_MESSAGE = st.fixed_dictionaries(
    {
        "role": mostly(
            st.sampled_from(["user", "assistant", "system", "developer", "tool", "function"]), st.just("nobody")
        ),
        "content": TEXT | st.lists(mostly(PART, SEEN_PART), min_size=1, max_size=3),
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
REFERENCE = st.fixed_dictionaries({"type": st.just("tool_reference"), "tool_name": st.just("look_up")})
BLOCK = st.one_of(
    TEXT_BLOCK,
    st.fixed_dictionaries({"type": st.just("tool_addition"), "tool": mostly(REFERENCE, JUNK)}),
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
    st.fixed_dictionaries(
        {
            "type": st.just("image"),
            "source": mostly(
                st.fixed_dictionaries({"type": mostly(st.just("base64"), st.just("url")), "data": IMAGE_DATA}), JUNK
            ),
        }
    ),
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
    st.fixed_dictionaries(
        {"type": st.just("tool_result"), "content": TEXT | st.lists(TEXT_BLOCK | REFERENCE, max_size=3)},
        optional={"cache_control": MARK},
    ),
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
                )
                | st.fixed_dictionaries({"type": st.just("input_image"), "image_url": mostly(IMAGE_URL, JUNK)}),
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
    st.fixed_dictionaries(
        {
            "type": st.just("item_reference"),
            "id": mostly(st.sampled_from(["msg_{request}", "msg_{request}_i0", "msg_none", "rs_{request}_9"]), JUNK),
        }
    ),
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
SEALED = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["compaction", "compaction_summary"]),
        "encrypted_content": mostly(st.text("AQab-_=", max_size=200), JUNK),
    }
)
"""Never readable: each server has its own key."""
