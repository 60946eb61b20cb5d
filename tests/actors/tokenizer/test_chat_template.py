"""Rendering chats: tools, calls, reasoning, continued messages, and the positions of cache breakpoints.

`QWEN_LIKE` supports every field and trims what it prints; the tiny model's template supports role and content only.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quipu.actors.messages.images import IMAGE_MARK
from quipu.actors.messages.prompts import CacheTtl, CallMark, ChatPrompt, ContentMark, ToolMark
from quipu.actors.shared.checkpoint import DEMO, CheckpointError
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.actors.tokenizer.chat_template import ChatTemplate, TemplateError
from tests.chats import encode_chat
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GPT_OSS_LIKE = """\
{%- for message in messages %}
{%- if message.tool_calls %}
{#- max 1 tool call per message #}
{%- if message.content and message.thinking %}{{ raise_exception('Cannot pass both.') }}{%- endif %}
{{- '(' + (message.content or message.thinking or '') + ')' }}
{%- set call = message.tool_calls[0].function %}
{{- '{' + call.name + ' ' + (call.arguments | tojson) + '}' }}
{%- else %}
{{- '[' + message.role + ']' + message.content }}
{%- if message.thinking and loop.last %}{{ '(' + message.thinking + ')' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if tools %}{{ '[effort ' + (reasoning_effort or 'medium') + ']' }}{%- endif %}"""
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
SYSTEM_MARK = ContentMark(SHORT, 0, len("Be brief."))


def tool(name: str, **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": f"It is {name}.", "parameters": parameters}}


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY = (
    message("system", "Be brief."),
    message("user", "Weather?"),
    message("assistant", "Let me see.", reasoning_content="Which town?", tool_calls=[call("weather", town="Cusco")]),
    message("tool", "Rain.", tool_call_id="weather"),
    message("user", "And?"),
)


def render(source: str, chat: ChatPrompt) -> str:
    return ChatTemplate(source, {}).render(chat).text


def before(source: str, chat: ChatPrompt) -> list[str]:
    """Return the text before each mark."""
    rendered = ChatTemplate(source, {}).render(chat)
    return [rendered.text[:end] for end in rendered.mark_ends]


def test_template_with_all_fields() -> None:
    """Tools, calls and reasoning are passed to the template."""
    text = render(QWEN_LIKE, ChatPrompt(HISTORY, tools=(tool("weather"),)))
    assert '"name": "weather", "description": "It is weather."' in text
    assert '(Which town?)Let me see.{weather {"town": "Cusco"}}[end][tool]Rain.[end][user]And?' in text


def test_template_without_tools_gets_text() -> None:
    """Nothing is lost: tools go before the system prompt, calls into their turn, results into user messages, reasoning
    before the content."""
    text = render(PLAIN_TEMPLATE, ChatPrompt(HISTORY, tools=(tool("weather"), tool("time"))))
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
    without_system = render(PLAIN_TEMPLATE, ChatPrompt(HISTORY[1:2], tools=(tool("time"),)))
    assert without_system.startswith("<|im_start|>system\nThese tools")


def test_template_with_calls_but_without_tools_gets_text() -> None:
    """Calls are shown in the form in which the tools were explained, also by a template with a form of its own."""
    source = "{% for m in messages %}[{{ m.role }}]{{ m.tool_calls or m.content }}{% endfor %}"
    text = render(source, ChatPrompt(HISTORY, tools=(tool("weather"),)))
    assert '<tool_call>\n{"name": "weather", "arguments": {"town": "Cusco"}}\n</tool_call>[user]' in text


def test_template_that_takes_one_call_at_a_time() -> None:
    """Several calls of a message become one message each, every one with its result; nothing is lost."""
    refusal = (
        "{% for m in messages if (m.tool_calls or []) | length > 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endfor %}"
    )
    asked = message("assistant", "Both.", tool_calls=[call("weather", town="Cusco"), call("time"), call("sun")])
    results = [message("tool", name, tool_call_id=name) for name in ("time", "weather", "other")]
    text = render(refusal + QWEN_LIKE, ChatPrompt((HISTORY[1], asked, *results, HISTORY[4])))
    assert text == (
        '[user]Weather?[end][assistant]Both.{weather {"town": "Cusco"}}[end][tool]weather[end][assistant]{time {}}[end]'
        "[tool]time[end][assistant]{sun {}}[end][tool]other[end][user]And?[end][assistant]"
    )
    seen = [message("tool", name + IMAGE_MARK, tool_call_id=name) for name in ("time", "weather")]
    assert "[tool]weather" in render(refusal + QWEN_LIKE, ChatPrompt((HISTORY[1], asked, *seen[::-1], HISTORY[4])))
    with pytest.raises(TemplateError, match="in the order of their calls"):
        render(refusal + QWEN_LIKE, ChatPrompt((HISTORY[1], asked, *seen, HISTORY[4])))


def test_template_that_names_reasoning_thinking() -> None:
    """Templates like gpt-oss's get reasoning in `thinking`, joined with the text beside calls, and one call at a time;
    what they drop of earlier turns is theirs to drop."""
    asked = message(
        "assistant", "Both.", reasoning_content="Hm.", tool_calls=[call("weather", town="Cusco"), call("time")]
    )
    results = [message("tool", name, tool_call_id=name) for name in ("time", "weather")]
    last = message("assistant", "Rain.", reasoning_content="So.")
    chat = ChatPrompt(
        (HISTORY[1], last, HISTORY[1], asked, *results, last),
        add_generation_prompt=False,
        tools=(tool("weather"),),
        template_kwargs={"reasoning_effort": "high"},
    )
    assert render(GPT_OSS_LIKE, chat) == (
        '[user]Weather?[assistant]Rain.[user]Weather?(Hm.\n\nBoth.){weather {"town": "Cusco"}}[tool]weather'
        "(){time {}}[tool]time[assistant]Rain.(So.)[effort high]"
    )
    assert "<think>" not in render(GPT_OSS_LIKE, chat)


def test_template_with_tools_of_the_system_message() -> None:
    """A template that looks for tools in the system message, like Phi-4-mini's, gets them there, as a JSON text."""
    shown = "[{{ m.role }}]{{ m.content }}{% if 'tools' in m %}|{{ m['tools'] }}{% endif %}"
    source = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    tools = (tool("weather"), tool("time"))
    listed = json.dumps([one["function"] for one in tools])
    assert f"[system]Be brief.|{listed}[user]" in render(source, ChatPrompt(HISTORY, tools=tools))
    assert render(source, ChatPrompt(HISTORY[1:2], tools=tools)).startswith(f"[system]|{listed}[user]")


@pytest.mark.parametrize("listed", ["call.function.arguments.items()", "call.function.arguments | items"])
def test_template_that_lists_arguments(listed: str) -> None:
    """Arguments that are no object are the only one, as in the Messages API, for templates that list arguments."""
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}{% for k, v in LISTED %}{{ k }}={{ v }};"
        "{% endfor %}{% endfor %}{% endfor %}{% if tools %}{{ tools }}{% endif %}"
    ).replace("LISTED", listed)
    begun = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Cus'}}
    asked = message("assistant", "", tool_calls=[call("weather", town="Cusco"), begun])
    results = [message("tool", "Rain.", tool_call_id=name) for name in ("weather", "c")]
    shown = '[assistant]town=Cusco;raw_arguments={"town": "Cus;[tool]Rain.[tool]Rain.'
    assert render(source, ChatPrompt((HISTORY[1], asked, *results))) == f"[user]Weather?{shown}"
    late = ChatPrompt((HISTORY[1], asked, *results, message("system", "Be brief.")))
    assert render(source, late) == f"[system]Be brief.[user]Weather?{shown}"
    with pytest.raises(TemplateError, match="late"):
        render(source + "{{ raise_exception('late') }}", late)


def test_plain_chats_are_not_converted() -> None:
    """An unusual role is passed to the template unchanged."""
    assert "<|im_start|>tool\nx<|im_end|>" in render(PLAIN_TEMPLATE, ChatPrompt((message("tool", "x"),)))


@pytest.mark.parametrize("source", [PLAIN_TEMPLATE, QWEN_LIKE])
@pytest.mark.parametrize("begun", ["The answer is", "", "\ufdd0 odd \ufdd0"])
def test_last_message_is_continued(source: str, begun: str) -> None:
    """The prompt is the one without the last message, followed by that message's text."""
    earlier = ChatPrompt((message("user", "Why?"),))
    prompt = render(source, earlier)
    chat = ChatPrompt((*earlier.messages, message("assistant", begun)), continue_final=True)
    assert render(source, chat) == prompt + begun


def test_documents() -> None:
    """A template gets the documents of a chat that has some."""
    source = "{% for d in documents or [] %}{{ d.title }}={{ d.text }};{% endfor %}{{ messages[0].content }}"
    chat = ChatPrompt((message("user", "Why?"),), documents=({"title": "t", "text": "x"}, {"title": "u", "text": "y"}))
    assert render(source, chat) == "t=x;u=y;Why?"
    assert render(source, ChatPrompt(chat.messages)) == "Why?"


def test_hidden_last_message_cannot_be_continued() -> None:
    """If the template does not show the last message, the client gets an error."""
    with pytest.raises(TemplateError, match="cannot be continued"):
        render("{{ messages[0].content }}", ChatPrompt(HISTORY[1:3], continue_final=True))


def test_marks_in_text() -> None:
    """Each mark is where its block ends in the rendered text, even if the template trims it; the text is unchanged."""
    messages = (message("system", "one two"), message("user", "three four  "))
    marks = (ContentMark(SHORT, 0, 3), ContentMark(SHORT, 0, 7), ContentMark(SHORT, 1, 5), ContentMark(SHORT, 1, 12))
    chat = ChatPrompt(messages, marks=marks)
    assert before(QWEN_LIKE, chat) == [
        "[system]one",
        "[system]one two",
        "[system]one two[end][user]three",
        "[system]one two[end][user]three four",
    ]
    assert render(QWEN_LIKE, chat) == render(QWEN_LIKE, ChatPrompt(messages))


@pytest.mark.parametrize("source", [PLAIN_TEMPLATE, QWEN_LIKE])
def test_marks_on_tools(source: str) -> None:
    """A tool's mark is at the end of its definition, except for the last brace."""
    chat = ChatPrompt(HISTORY, tools=(tool("weather"), tool("time")), marks=(ToolMark(SHORT, 0), ToolMark(SHORT, 1)))
    first, second = before(source, chat)
    assert "It is weather." in first and "It is time." not in first
    assert first.endswith('"properties": {}}}') and second.endswith('"properties": {}}}')
    assert "It is time." in second


def test_template_that_prints_parts_of_a_tool() -> None:
    """The mark is after the last printed part that can be marked, or 0 if the template prints nothing."""
    source = (
        "{% for t in tools %}{{ t.function.name }}: {{ t.function.description }}\n{% endfor %}{{ messages[0].content }}"
    )
    chat = ChatPrompt(HISTORY, tools=(tool("time"),), marks=(ToolMark(SHORT, 0),))
    assert before(source, chat) == ["time: It is time."]
    assert ChatTemplate("{{ messages and tools and 'x' }}", {}).render(chat).mark_ends == (0,)


def test_mark_on_system_prompt_covers_tools() -> None:
    """The mark covers the tools even if the template prints them after it; positions never decrease."""
    tools = (tool("weather"),)
    marks = (ToolMark(SHORT, 0), ContentMark(SHORT, 0, 9), ContentMark(SHORT, 1, 8))
    of_tool, of_system, of_user = before(QWEN_LIKE, ChatPrompt(HISTORY, tools=tools, marks=marks))
    assert of_tool == of_system and "It is weather." in of_system and of_user.endswith("[user]Weather?")
    (alone,) = before(QWEN_LIKE, ChatPrompt(HISTORY, tools=tools, marks=marks[1:2]))
    assert alone == of_system


def test_positions_never_decrease() -> None:
    """A mark on a message covers the tools even if a template prints them last."""
    source = "{{ messages[0].content }};{% for t in tools %}{{ t | tojson }}{% endfor %}"
    marks = (ToolMark(SHORT, 0), ContentMark(SHORT, 0, 8))
    of_tool, of_user = before(source, ChatPrompt(HISTORY[1:2], tools=(tool("time"),), marks=marks))
    assert of_user == of_tool and of_tool.startswith("Weather?;")


def test_marks_on_calls_and_results() -> None:
    """Marks on calls and results work in both kinds of template."""
    marks = (CallMark(SHORT, 2, 0), ContentMark(SHORT, 3, 5))
    for source, end in ((QWEN_LIKE, "[tool]Rain."), (PLAIN_TEMPLATE, "<tool_response>\nRain.")):
        of_call, of_result = before(source, ChatPrompt(HISTORY, marks=marks))
        assert of_call.endswith('"Cusco"') and of_result.endswith(end)


@pytest.mark.parametrize("source", [PLAIN_TEMPLATE, QWEN_LIKE])
def test_mark_on_a_call_whose_arguments_are_text(source: str) -> None:
    """Arguments that the model wrote badly are text; the mark is at its end."""
    begun = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Cus'}}
    chat = ChatPrompt((HISTORY[1], message("assistant", "", tool_calls=[begun])), marks=(CallMark(SHORT, 1, 0),))
    (of_call,) = before(source, chat)
    assert of_call.endswith("Cus")


@pytest.mark.parametrize("source", [PLAIN_TEMPLATE, QWEN_LIKE])
def test_marks_on_tools_without_a_description(source: str) -> None:
    """A tool whose description is null has its mark at the end of its definition, like any other."""
    bare = tool("weather")
    bare["function"]["description"] = None
    of_tool, of_system = before(source, ChatPrompt(HISTORY, tools=(bare,), marks=(ToolMark(SHORT, 0), SYSTEM_MARK)))
    assert of_tool.endswith('"properties": {}}}') and of_system.startswith(of_tool)


def test_positions_in_tokens(tmp_path: Path) -> None:
    """A breakpoint counts the tokens that end before it, also within a character of several tokens."""
    vocabulary = Vocabulary(TINY)
    text = "hé🌍 wörld, once more"
    for num_chars in range(len(text) + 1):
        chat = ChatPrompt((message("user", text),), marks=(ContentMark(SHORT, 0, num_chars),))
        encoded = encode_chat(vocabulary, chat)
        (found,) = encoded.breakpoints
        ends = vocabulary.tokenizer.encode(
            "<|im_start|>user\n" + text + "<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
        ).offsets
        assert found.position == sum(end <= len("<|im_start|>user\n") + num_chars for _, end in ends)
        assert encoded.token_ids == encode_chat(vocabulary, ChatPrompt(chat.messages)).token_ids


def test_tiny_model_uses_the_template_tested_here(tmp_path: Path) -> None:
    """The tiny checkpoint has the same template as `PLAIN_TEMPLATE`."""
    shutil.copytree(TINY, tmp_path / "tiny")
    (tmp_path / "tiny" / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    chat = ChatPrompt(HISTORY, tools=(tool("time"),))
    assert encode_chat(Vocabulary(tmp_path / "tiny"), chat) == encode_chat(Vocabulary(TINY), chat)


MESSAGES = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a quipu? ünïcödé ✓"},
    {"role": "assistant", "content": "A knotted cord."},
    {"role": "user", "content": "Why?"},
)


@pytest.mark.parametrize("folder", [TINY, DEMO], ids=["tiny", "demo"])
def test_chat_template_renders_like_transformers(folder: Path) -> None:
    """The ids are those of transformers' `apply_chat_template`."""
    reference = AutoTokenizer.from_pretrained(folder)
    for prompt in (True, False):
        expected = reference.apply_chat_template(list(MESSAGES), add_generation_prompt=prompt, return_dict=False)
        assert encode_chat(Vocabulary(folder), ChatPrompt(MESSAGES, prompt)).token_ids == expected


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_demo_template_renders_tools_like_transformers(enable_thinking: bool) -> None:
    """Tools, calls, results and the switch for reasoning give the ids of transformers' `apply_chat_template`."""
    tools, fields = (tool("weather"), tool("time")), {"enable_thinking": enable_thinking}
    reference, vocabulary = AutoTokenizer.from_pretrained(DEMO), Vocabulary(DEMO)
    for length in range(2, len(HISTORY) + 1):
        expected = reference.apply_chat_template(
            list(HISTORY[:length]), tools=list(tools), add_generation_prompt=True, return_dict=False, **fields
        )
        chat = ChatPrompt(HISTORY[:length], tools=tools, template_kwargs=fields)
        assert encode_chat(vocabulary, chat).token_ids == expected


def write_template(folder: Path, template: str | None) -> Vocabulary:
    shutil.copy(TINY / "tokenizer.json", folder)
    config = {} if template is None else {"chat_template": template, "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Vocabulary(folder)


def test_failing_templates(tmp_path: Path) -> None:
    """The error says what a template raised, or that there is none; template code cannot reach Python."""
    chat = ChatPrompt(MESSAGES)
    refusing = write_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        encode_chat(refusing, chat)
    with pytest.raises(TemplateError, match="no chat template"):
        encode_chat(write_template(tmp_path, None), chat)
    escaping = write_template(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TemplateError):
        encode_chat(escaping, chat)
    with pytest.raises(CheckpointError, match="does not compile"):
        InlineRenderer(write_template(tmp_path, "{% if %}").template)
