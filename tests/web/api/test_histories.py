"""Histories with every message, part and item in the types of OpenAI's and Anthropic's clients: none is fatal.

Each kind that the installed clients know has an example here, with the expected result.
"""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types.beta.beta_content_block_param import BetaContentBlockParam
from anthropic.types.beta.beta_tool_result_block_param import Content as ResultContent
from openai.types.chat import chat_completion_message_tool_call_union_param as chat_calls
from openai.types.responses.response_function_call_output_item_param import ResponseFunctionCallOutputItemParam
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.response_output_message_param import Content as AnswerContent
from typing_extensions import is_typeddict

from tests.web.asked import Asked, ask, refused

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}


def kinds(union: Any) -> set[str]:
    """Return the `type` of each member of a union in the client's types."""
    literals = (get_type_hints(kind)["type"] for kind in get_args(union) if is_typeddict(kind))
    # One is optional: a union of its literal and None.
    found = (next(iter(get_args(literal))) for literal in literals)
    return {name if type(name) is str else get_args(name)[0] for name in found}


# ---------------------------------------------------------------- messages

SKIPPED: dict[str, dict[str, Any]] = {
    "server_tool_use": {"id": "s", "name": "web_search", "input": {"query": "quipu"}, "caller": {"type": "direct"}},
    "web_search_tool_result": {
        "tool_use_id": "s",
        "content": [{"type": "web_search_result", "url": "u", "title": "t"}],
    },
    "web_fetch_tool_result": {"tool_use_id": "s", "content": {"type": "web_fetch_result", "url": "u"}},
    "advisor_tool_result": {"tool_use_id": "s", "content": {"type": "advisor_result", "text": "x"}},
    "code_execution_tool_result": {"tool_use_id": "s", "content": {"stdout": "1", "content": []}},
    "bash_code_execution_tool_result": {"tool_use_id": "s", "content": {"stdout": "1"}},
    "text_editor_code_execution_tool_result": {"tool_use_id": "s", "content": {}},
    "tool_search_tool_result": {"tool_use_id": "s", "content": {"tool_references": [{"tool_name": "x"}]}},
    "mcp_tool_use": {"id": "m", "name": "echo", "server_name": "s", "input": {}},
    "mcp_tool_result": {"tool_use_id": "m", "is_error": False, "content": [{"type": "text", "text": "x"}]},
    "container_upload": {"file_id": "f"},
    "tool_addition": {"tool": {"type": "tool_reference", "tool_name": "x"}},
    "tool_removal": {"tool": {"type": "tool_reference", "tool_name": "x"}},
    "mcp_tool_listing": {"mcp_server_name": "s", "tools": [{"name": "x"}]},
    "fallback": {"from": {"model": "a"}, "to": {"model": "b"}, "trigger": {}},
    "tool_reference": {"tool_name": "x"},
    "browser_state": {"tabs": []},
    "made_up_tool_result": {"content": [{"type": "unknown"}]},
}
SAID: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"text": "a", "citations": [{"type": "char_location", "cited_text": "c"}]}, "a"),
    "search_result": ({"title": "t", "source": "u", "content": [{"type": "text", "text": "b"}]}, "t\nu\nb"),
    "document": ({"title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}, "t\nd"),
    "compaction": ({"content": "the summary"}, "the summary"),
}
UNREADABLE: dict[str, dict[str, Any]] = {
    "image": {"source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
    "document": {"source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}},
}
ELSEWHERE = {"thinking", "redacted_thinking", "tool_use", "tool_result"}
"""Tested in `test_anthropic_prompt.py`."""


async def converse(role: str, *blocks: dict[str, Any]) -> Asked:
    turns = [USER, {"role": role, "content": list(blocks)}, {"role": "user", "content": "thanks"}]
    return await ask(MESSAGES, {"model": "tiny", "max_tokens": 4, "messages": turns})


def test_every_block_is_known() -> None:
    """Every block that the client can put into a message is in one of the tables above."""
    known = SKIPPED.keys() | SAID.keys() | UNREADABLE.keys() | ELSEWHERE
    assert kinds(BetaContentBlockParam) | kinds(ResultContent) <= known


@pytest.mark.parametrize("kind", SKIPPED)
async def test_blocks_of_anthropics_tools(kind: str) -> None:
    """Blocks of Anthropic's own tools are skipped and named, once and as a whole; the text around them is served."""
    block = {"type": kind, **SKIPPED[kind]}
    for role in ("assistant", "user"):
        asked = await converse(role, {"type": "text", "text": "a"}, block, {"type": "text", "text": "b"})
        said = [message["content"] for message in asked.prompt.messages]
        assert said == (["hi", "ab", "thanks"] if role == "assistant" else ["hi\n\nab\n\nthanks"])
        assert asked.ignored == "messages.1.content.1"
        alone = await converse(role, block)
        assert alone.ignored == "messages.1.content.0"


@pytest.mark.parametrize("kind", SAID)
async def test_blocks_with_text(kind: str) -> None:
    """The text of every block that has one is rendered, in a message as in the result of a tool."""
    fields, said = SAID[kind]
    block = {"type": kind, **fields}
    assert (await converse("user", block)).prompt.messages[0]["content"].endswith(said + "\n\nthanks")
    assert (await converse("assistant", block)).prompt.messages[1]["content"] == said
    assert (await result_of(block)).prompt.messages[2]["content"] == said


async def result_of(*content: dict[str, Any]) -> Asked:
    """Ask with the result of a tool."""
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    turns = [
        USER,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": list(content)}]},
    ]
    return await ask(MESSAGES, {"model": "tiny", "max_tokens": 4, "messages": turns})


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_images_in_results(kind: str) -> None:
    """The text of a result is served and its image named; in a user's own message an image is refused."""
    block = {"type": kind, **UNREADABLE[kind]}
    asked = await result_of({"type": "text", "text": "a"}, block, {"type": "tool_reference", "tool_name": "x"})
    assert asked.prompt.messages[2] == {"role": "tool", "content": "a", "tool_call_id": "t"}
    assert asked.ignored == "messages.2.content.0.content.1,messages.2.content.0.content.2"
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}
    assert (await refused(MESSAGES, body))[1].startswith("Unsupported value for `messages.0.content.0.type`")


# ---------------------------------------------------------------- responses

TEXT = {"type": "input_text", "text": "t"}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "function_call": ({"call_id": "c", "name": "f", "arguments": "{}"}, {"name": "f", "arguments": {}}),
    "custom_tool_call": ({"call_id": "c", "name": "f", "input": "i"}, {"name": "f", "arguments": {"input": "i"}}),
    "local_shell_call": ({"call_id": "c", "action": {"a": 1}}, {"name": "local_shell", "arguments": {"a": 1}}),
    "shell_call": ({"call_id": "c", "action": {"commands": []}}, {"name": "shell", "arguments": {"commands": []}}),
    "apply_patch_call": ({"call_id": "c", "operation": {"p": 1}}, {"name": "apply_patch", "arguments": {"p": 1}}),
}
RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "function_call_output": ({"call_id": "c", "output": [TEXT, {"type": "input_image", "image_url": "u"}]}, "t"),
    "custom_tool_call_output": ({"call_id": "c", "output": [TEXT, {"type": "input_file", "file_id": "f"}]}, "t"),
    "local_shell_call_output": ({"id": "c", "output": "t"}, "t"),
    "shell_call_output": (
        {"call_id": "c", "output": [{"stdout": "t", "stderr": "u", "outcome": {"type": "exit", "exit_code": 1}}]},
        "tu",
    ),
    "apply_patch_call_output": ({"call_id": "c", "status": "failed"}, ""),
}
OTHERS = {"message", "reasoning", "additional_tools", "compaction", "compaction_trigger"}
"""Tested in `test_responses_tools.py`, `test_compaction.py` and `test_triggered.py`."""


def test_every_part_is_known() -> None:
    """Every part that the client can put into results and answers has an example here."""
    assert kinds(ResponseFunctionCallOutputItemParam) == {"input_text", "input_image", "input_file"}
    assert kinds(AnswerContent) == {"output_text", "refusal"}
    assert kinds(chat_calls.ChatCompletionMessageToolCallUnionParam) == {"function", "custom"}


@pytest.mark.parametrize("kind", sorted(kinds(ResponseInputItemParam) - OTHERS))
async def test_items(kind: str) -> None:
    """Calls and results that a client carries out are rendered; what OpenAI's server did is skipped and named."""
    fields, call = CALLS.get(kind, ({}, {}))
    if kind == "item_reference":  # it stands for what is stored, and here nothing is
        assert (await refused(RESPONSES, {"model": "tiny", "input": [{"type": kind, "id": "x"}]}))[0] == "input[0]"
        return
    if kind in RESULTS:
        fields, said = RESULTS[kind]
    asked = await ask(RESPONSES, {"model": "tiny", "input": [USER, {"type": kind, "id": "x", **fields}]})
    if kind in CALLS:
        (made,) = asked.prompt.messages[1]["tool_calls"]
        assert made == {"id": "c", "type": "function", "function": call} and asked.ignored is None
    elif kind in RESULTS:
        assert asked.prompt.messages[1]["role"] == "tool" and asked.prompt.messages[1]["content"] == said
        assert asked.ignored == ("input[1].output[1]" if type(fields.get("output")) is list and said == "t" else None)
    else:
        assert asked.prompt.messages == (USER,) and asked.ignored == "input[1]"


async def test_refusals() -> None:
    """A refusal of an earlier turn is text of the assistant."""
    item = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    asked = await ask(RESPONSES, {"model": "tiny", "input": [USER, item]})
    assert asked.prompt.messages[1] == {"role": "assistant", "content": "no"} and asked.ignored is None


# ---------------------------------------------------------------- chat


@pytest.mark.parametrize(
    ("message", "said", "ignored"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}, "ab", None),
        ({"content": None, "refusal": "no"}, "no", None),
        ({"content": "", "refusal": "no"}, "no", None),
        ({"content": "yes", "refusal": "no"}, "yes", None),
        ({"content": None, "audio": {"id": "x"}}, "", "messages[1].audio"),
        ({"content": "a", "name": "n", "annotations": []}, "a", None),
    ],
)
async def test_answers_of_chat(message: dict[str, Any], said: str, ignored: str | None) -> None:
    """The text of an answer is used, whichever field it is in; its audio is skipped and named."""
    asked = await ask(CHAT, {"model": "tiny", "messages": [USER, {"role": "assistant", **message}, USER]})
    assert asked.prompt.messages[1]["content"] == said and asked.ignored == ignored


async def test_custom_calls_of_chat() -> None:
    """A call of a custom tool is one with the argument `input`, as on responses; images of its result are named."""
    call = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "i"}}
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]
    turns = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": parts}]
    asked = await ask(CHAT, {"model": "tiny", "messages": turns})
    assert asked.prompt.messages[1]["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"input": "i"}}}
    ]
    assert asked.prompt.messages[2]["content"] == "a" and asked.ignored == "messages[2].content[1]"
    own = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
    assert (await refused(CHAT, own))[0] == "messages[0].content[1].type"
