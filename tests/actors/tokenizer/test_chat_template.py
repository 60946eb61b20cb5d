"""What a chat becomes: tools, calls, thoughts, the beginning of an answer, and where cache breakpoints fall.

`QWEN_LIKE` knows everything that a template may know and trims what it prints; the demo's knows role and content only.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from quipu.actors.messages.prompts import CacheTtl, CallMark, ChatPrompt, ContentMark, ToolMark
from quipu.actors.shared.checkpoint import DEMO
from quipu.actors.tokenizer.chat_template import ChatTemplate, TemplateError
from tests.chats import encode_chat
from tests.vocabularies import Vocabulary

DEMO_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN_LIKE = """\
{%- if tools %}
{{- '[system]' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '|' }}{%- endif %}
{%- for tool in tools %}{{- tool | tojson + ';' }}{%- endfor %}
{{- '[end]' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and tools and message.role == 'system') %}
{{- '[' + message.role + ']' }}
{%- if message.reasoning_content %}{{- '(' + message.reasoning_content + ')' }}{%- endif %}
{{- message.content | trim }}
{%- for call in message.tool_calls or [] %}
{{- '{' + call.function.name + ' ' + (call.function.arguments | tojson) + '}' }}
{%- endfor %}
{{- '[end]' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"""

SHORT = CacheTtl.FIVE_MINUTES


def tool(name: str, **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": f"It is {name}.", "parameters": parameters}}


def said(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY = (
    said("system", "Be brief."),
    said("user", "Weather?"),
    said("assistant", "Let me see.", reasoning_content="Which town?", tool_calls=[call("weather", town="Cusco")]),
    said("tool", "Rain.", tool_call_id="weather"),
    said("user", "And?"),
)


def render(source: str, chat: ChatPrompt) -> str:
    return ChatTemplate(source, {}).render(chat).text


def before(source: str, chat: ChatPrompt) -> list[str]:
    """The text before each mark."""
    rendered = ChatTemplate(source, {}).render(chat)
    return [rendered.text[:end] for end in rendered.mark_ends]


def test_a_template_that_knows_everything_gets_everything() -> None:
    """Tools, calls and reasoning go to the template's own variables."""
    text = render(QWEN_LIKE, ChatPrompt(HISTORY, tools=(tool("weather"),)))
    assert '"name": "weather", "description": "It is weather."' in text
    assert '(Which town?)Let me see.{weather {"town": "Cusco"}}[end][tool]Rain.[end][user]And?' in text


def test_a_template_that_knows_less_gets_text() -> None:
    """Nothing is dropped: tools stand before the system prompt, calls in the turn that made them, results with the
    user, reasoning before what was said."""
    text = render(DEMO_TEMPLATE, ChatPrompt(HISTORY, tools=(tool("weather"), tool("time"))))
    system, user, assistant, results, last = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nThese tools") and system.endswith("\n\nBe brief.<|im_end|>\n")
    assert system.index('"weather"') < system.index('"time"') < system.index("Be brief.")
    assert user == "user\nWeather?<|im_end|>\n"
    assert assistant == (
        "assistant\n<think>\nWhich town?\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"town": "Cusco"}}\n</tool_call><|im_end|>\n'
    )
    assert results == "user\n<tool_response>\nRain.\n</tool_response>\nAnd?<|im_end|>\n"
    assert last == "assistant\n"
    without_system = render(DEMO_TEMPLATE, ChatPrompt(HISTORY[1:2], tools=(tool("time"),)))
    assert without_system.startswith("<|im_start|>system\nThese tools")


def test_a_template_that_knows_less_is_left_alone_where_nothing_is_needed() -> None:
    """A role that it may not expect is still its own affair."""
    assert "<|im_start|>tool\nx<|im_end|>" in render(DEMO_TEMPLATE, ChatPrompt((said("tool", "x"),)))


@pytest.mark.parametrize("source", [DEMO_TEMPLATE, QWEN_LIKE])
@pytest.mark.parametrize("begun", ["The answer is", "", "\ufdd0 odd \ufdd0"])
def test_a_begun_answer_is_continued(source: str, begun: str) -> None:
    """The prompt ends with the last character of the last message, and begins as it would have without it."""
    asked = ChatPrompt((said("user", "Why?"),))
    prompt = render(source, asked)
    chat = ChatPrompt((*asked.messages, said("assistant", begun)), continue_final=True)
    assert render(source, chat) == prompt + begun


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    """That is the client's to know, not an answer to something else."""
    with pytest.raises(TemplateError, match="cannot be continued"):
        render("{{ messages[0].content }}", ChatPrompt(HISTORY[1:3], continue_final=True))


def test_marks_in_text() -> None:
    """Each is where its block ends in the rendered text, also where the template trims; and no mark shows."""
    messages = (said("system", "one two"), said("user", "three four  "))
    marks = (ContentMark(SHORT, 0, 3), ContentMark(SHORT, 0, 7), ContentMark(SHORT, 1, 5), ContentMark(SHORT, 1, 12))
    chat = ChatPrompt(messages, marks=marks)
    assert before(QWEN_LIKE, chat) == [
        "[system]one",
        "[system]one two",
        "[system]one two[end][user]three",
        "[system]one two[end][user]three four",
    ]
    assert render(QWEN_LIKE, chat) == render(QWEN_LIKE, ChatPrompt(messages))


@pytest.mark.parametrize("source", [DEMO_TEMPLATE, QWEN_LIKE])
def test_marks_on_tools(source: str) -> None:
    """A tool's mark lies at the end of its definition, the last brace aside."""
    chat = ChatPrompt(HISTORY, tools=(tool("weather"), tool("time")), marks=(ToolMark(SHORT, 0), ToolMark(SHORT, 1)))
    first, second = before(source, chat)
    assert "It is weather." in first and "It is time." not in first
    assert first.endswith('"properties": {}}}') and second.endswith('"properties": {}}}')
    assert "It is time." in second


def test_a_template_that_prints_parts_of_a_tool() -> None:
    """Its mark is where the last of the parts that can be marked ends; a template that prints nothing leaves 0."""
    source = (
        "{% for t in tools %}{{ t.function.name }}: {{ t.function.description }}\n{% endfor %}{{ messages[0].content }}"
    )
    chat = ChatPrompt(HISTORY, tools=(tool("time"),), marks=(ToolMark(SHORT, 0),))
    assert before(source, chat) == ["time: It is time."]
    assert ChatTemplate("{{ messages and tools and 'x' }}", {}).render(chat).mark_ends == (0,)


def test_a_system_prompt_has_the_tools_before_it() -> None:
    """Its mark covers them also where the template prints them after it; marks never go back."""
    tools = (tool("weather"),)
    marks = (ToolMark(SHORT, 0), ContentMark(SHORT, 0, 9), ContentMark(SHORT, 1, 8))
    of_tool, of_system, of_user = before(QWEN_LIKE, ChatPrompt(HISTORY, tools=tools, marks=marks))
    assert of_tool == of_system and "It is weather." in of_system and of_user.endswith("[user]Weather?")
    (alone,) = before(QWEN_LIKE, ChatPrompt(HISTORY, tools=tools, marks=marks[1:2]))
    assert alone == of_system


def test_marks_never_go_back() -> None:
    """Also where a template prints the tools last: whoever keeps a message keeps the tools before it."""
    source = "{{ messages[0].content }};{% for t in tools %}{{ t | tojson }}{% endfor %}"
    marks = (ToolMark(SHORT, 0), ContentMark(SHORT, 0, 8))
    of_tool, of_user = before(source, ChatPrompt(HISTORY[1:2], tools=(tool("time"),), marks=marks))
    assert of_user == of_tool and of_tool.startswith("Weather?;")


def test_marks_on_calls_and_results() -> None:
    """In both kinds of template."""
    marks = (CallMark(SHORT, 2, 0), ContentMark(SHORT, 3, 5))
    for source, end in ((QWEN_LIKE, "[tool]Rain."), (DEMO_TEMPLATE, "<tool_response>\nRain.")):
        of_call, of_result = before(source, ChatPrompt(HISTORY, marks=marks))
        assert of_call.endswith('"Cusco"') and of_result.endswith(end)


def test_positions_in_tokens(tmp_path: Path) -> None:
    """A breakpoint counts the tokens that lie wholly before it, characters of several tokens included."""
    vocabulary = Vocabulary(DEMO)
    text = "hé🌍 wörld, once more"
    for num_chars in range(len(text) + 1):
        chat = ChatPrompt((said("user", text),), marks=(ContentMark(SHORT, 0, num_chars),))
        encoded = encode_chat(vocabulary, chat)
        (found,) = encoded.breakpoints
        ends = vocabulary.tokenizer.encode(
            "<|im_start|>user\n" + text + "<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
        ).offsets
        assert found.position == sum(end <= len("<|im_start|>user\n") + num_chars for _, end in ends)
        assert encoded.token_ids == encode_chat(vocabulary, ChatPrompt(chat.messages)).token_ids


def test_the_demo_s_template_is_the_one_tested_here(tmp_path: Path) -> None:
    """So what the demo model is given is what these tests show."""
    shutil.copytree(DEMO, tmp_path / "demo")
    (tmp_path / "demo" / "chat_template.jinja").write_text(DEMO_TEMPLATE)
    chat = ChatPrompt(HISTORY, tools=(tool("time"),))
    assert encode_chat(Vocabulary(tmp_path / "demo"), chat) == encode_chat(Vocabulary(DEMO), chat)
