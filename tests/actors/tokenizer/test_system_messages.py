"""System messages where a template does not expect them, and messages of the role `developer`."""

from __future__ import annotations

import attrs
import pytest

from quipu.actors.messages.prompts import CacheTtl, CallMark, ChatPrompt, ContentMark, ToolMark
from quipu.actors.tokenizer.chat_template import ChatTemplate, TemplateError
from quipu.actors.tokenizer.system_messages import merge_upward

CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}!{{ c }}{% endfor %}{% endfor %}"
)
STRICT = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be first') }}{% endif %}
{%- if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '[' + m.role + ']' + m.content }}
{%- for c in m.tool_calls if tools is defined %}{{ '!' + c.function.arguments | tojson }}{% endfor %}
{%- endfor %}"""
SHORT = CacheTtl.FIVE_MINUTES


def said(*messages: str, continue_final: bool = False) -> ChatPrompt:
    """Make a chat of messages like "user:text"."""
    pairs = [message.split(":", 1) for message in messages]
    chat = tuple({"role": role, "content": text} for role, text in pairs)
    return ChatPrompt(chat, continue_final=continue_final)


def render(source: str, chat: ChatPrompt) -> str:
    return ChatTemplate(source, {}).render(chat).text


def test_developer_where_it_is_unknown() -> None:
    """A developer message is rendered as a system message, except by templates that know the role."""
    chat = said("developer:d", "user:u")
    assert render(CHATML, chat) == "[system]d[user]u"
    assert render(CHATML + "{# #}{% if 'developer' == 1 %}{% endif %}", chat) == "[developer]d[user]u"


def test_templates_that_accept_late_system_messages_get_them() -> None:
    """A system message is moved only if the template refuses it where it is."""
    assert render(CHATML, said("user:u", "system:s", "user:v")) == "[user]u[system]s[user]v"


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        (said("system:a", "developer:b", "user:u"), "[system]a\n\nb[user]u"),
        (said("user:u", "system:s", "assistant:x"), "[system]s[user]u[assistant]x"),
        (said("system:a", "user:u", "system:b", "user:v", "assistant:x"), "[system]a\n\nb[user]u\n\nv[assistant]x"),
    ],
)
def test_late_system_messages_are_merged(chat: ChatPrompt, text: str) -> None:
    """Late system messages become part of the first message; user messages that then follow each other become one."""
    assert render(STRICT, chat) == text


def test_templates_that_refuse_every_system_message() -> None:
    """The system prompt, and tools that are explained there, become part of the user's first message."""
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    for chat, text in (
        (said("system:s", "user:u", "assistant:a"), "[user]s\n\nu[assistant]a"),
        (said("system:s", "assistant:a"), "[user]s[assistant]a"),
        (said("user:u"), "[user]u"),
    ):
        assert render(refusal + CHATML, chat) == text
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    chat = attrs.evolve(said("user:u"), tools=(tool,), marks=(ToolMark(SHORT, 0), ContentMark(SHORT, 0, 1)))
    rendered = ChatTemplate(refusal + CHATML, {}).render(chat)
    assert rendered.text.startswith("[user]These tools") and rendered.text.endswith("\n\nu")
    assert '"f"' in rendered.text[: rendered.mark_ends[0]] and rendered.mark_ends[1] == len(rendered.text)


def test_other_refusals_keep_their_reason() -> None:
    """If merging does not help, the error is the one about the chat as it was sent."""
    with pytest.raises(TemplateError, match="Roles must alternate"):
        render(STRICT, said("assistant:x", "assistant:y", "system:s"))
    with pytest.raises(TemplateError, match="must be first"):
        render(STRICT, said("user:u", "system:s", continue_final=True))


def test_marks_stay_with_their_text() -> None:
    """A mark ends after the same text as before; one in a text that has moved upward covers what precedes it."""
    chat = said("system:ab", "user:cd", "system:ef", "user:gh", "assistant:x", "user:z")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = (*chat.messages[:4], {**chat.messages[4], "tool_calls": [call]}, chat.messages[5])
    marks = (
        ContentMark(SHORT, 0, 1),
        ContentMark(SHORT, 1, 2),
        ContentMark(SHORT, 2, 1),
        ContentMark(SHORT, 3, 1),
        CallMark(SHORT, 4, 0),
        ContentMark(SHORT, 5, 1),
    )
    rendered = ChatTemplate(STRICT, {}).render(ChatPrompt(messages, marks=marks))
    user = "[system]ab\n\nef[user]cd"
    assert [rendered.text[:end] for end in rendered.mark_ends] == [
        "[system]a",
        user,
        user,
        f"{user}\n\ng",
        f"{user}\n\ngh[assistant]x!{{",
        f"{user}\n\ngh[assistant]x!{{}}[user]z",
    ]
    moved = merge_upward(ChatPrompt(messages, marks=(ToolMark(SHORT, 0), marks[2])))
    assert moved is not None and moved.marks == (ToolMark(SHORT, 0), ContentMark(SHORT, 0, 5))


def test_nothing_to_merge() -> None:
    """A chat without late system messages is not changed."""
    assert merge_upward(said("system:s", "user:u")) is None
    assert merge_upward(said("user:u")) is None
