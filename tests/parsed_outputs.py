"""Run outputs through the response parser, and render well-formed ones for each family."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from quipu.actors.detokenizer.response_parsing.parser_choice import choose
from quipu.actors.detokenizer.response_parsing.response_parser import ResponseParser
from quipu.actors.detokenizer.response_parsing.response_template import ResponseTemplate
from quipu.actors.messages.output import (
    ArgumentsDelta,
    ArgumentTypes,
    CallBegin,
    CallEnd,
    Markup,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)

TOOLS: dict[str, ArgumentTypes] = {
    "get_weather": {},
    "f": {
        "text": ("string",),
        "count": ("integer",),
        "ratio": ("number",),
        "flag": ("boolean",),
        "maybe": ("string", "null"),
        "things": ("array",),
        "options": ("object", "null"),
    },
}
PLAIN = 1000
"""The id of a token that is no special one."""

Token = str | tuple[int, str]


@attrs.frozen
class Parsed:
    events: list[OutputEvent]
    """Adjacent events of a kind are merged."""
    num_reasoning_tokens: int

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def reasoning(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, ReasoningDelta))

    @property
    def markup(self) -> str:
        return "".join(event.source for event in self.events if isinstance(event, Markup))

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Each call's name and arguments."""
        names = [event.name for event in self.events if isinstance(event, CallBegin)]
        return [(name, self.arguments(index)) for index, name in enumerate(names)]

    @property
    def num_ended(self) -> int:
        return sum(isinstance(event, CallEnd) for event in self.events)

    @property
    def open_call(self) -> int | None:
        """The index of the call that has begun and not ended."""
        num_begun = len(self.calls)
        return num_begun - 1 if num_begun > self.num_ended else None

    def arguments(self, index: int) -> str:
        return "".join(e.text for e in self.events if isinstance(e, ArgumentsDelta) and e.index == index)


def template_of(
    tool_calls: str, reasoning: str = "none", special_ids: Mapping[str, int] | None = None
) -> ResponseTemplate:
    template = choose(tool_calls, reasoning, None, None, special_ids or {}).template
    assert template is not None
    return template


def parse(
    template: ResponseTemplate,
    tokens: Iterable[Token],
    *,
    tools: Mapping[str, ArgumentTypes] = TOOLS,
    prompt: Sequence[tuple[int, str]] = (),
) -> Parsed:
    """Parse tokens, which are texts or ids with texts. Check that no character is lost."""
    parser = ResponseParser(template, tools, prompt)
    events: list[OutputEvent] = []
    raw = ""
    for token in tokens:
        token_id, piece = (PLAIN, token) if isinstance(token, str) else token
        events.extend(parser.push(token_id, piece))
        raw += piece
    events.extend(parser.finish())
    assert "".join(event.source for event in events) == raw
    return Parsed(merged(events), parser.num_reasoning_tokens)


def merged(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Merge adjacent events of a kind."""
    found: list[OutputEvent] = []
    for event in events:
        last = found[-1] if found else None
        match last, event:
            case TextDelta(), TextDelta():
                found[-1] = TextDelta(last.text + event.text)
            case ReasoningDelta(), ReasoningDelta():
                found[-1] = ReasoningDelta(last.text + event.text)
            case Markup(), Markup():
                found[-1] = Markup(last.source + event.source)
            case ArgumentsDelta(), ArgumentsDelta() if last.index == event.index:
                found[-1] = ArgumentsDelta(event.index, last.text + event.text, last.source + event.source)
            case _:
                found.append(event)
    return found


Call = tuple[str, dict[str, Any]]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json_call(call: Call) -> str:
    return _json({"name": call[0], "arguments": call[1]})


def _tags(arguments: dict[str, Any]) -> str:
    return "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )


def gemma_value(value: object, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{key}:{gemma_value(one, quote)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(gemma_value(one, quote) for one in value) + "]"
    return json.dumps(value)


def deepseek(text: str) -> str:
    return text.replace("[", "<\uff5ctool\u2581").replace("]", "\uff5c>").replace("_", "\u2581")


def render_calls(family: str, calls: list[Call]) -> str:
    """Return calls as a model of the family writes them."""
    match family:
        case "hermes":
            return "\n".join(f"<tool_call>\n{_json_call(call)}\n</tool_call>" for call in calls)
        case "qwen3_coder":
            return "\n".join(
                f"<tool_call>\n<function={name}>\n{_tags(arguments)}</function>\n</tool_call>"
                for name, arguments in calls
            )
        case "llama3_json":
            return "<|python_tag|>" + "; ".join(map(_json_call, calls))
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(map(_json_call, calls))}]"
        case "phi4_mini_json":
            return f"<|tool_call|>[{', '.join(map(_json_call, calls))}]<|/tool_call|>"
        case "openai":
            return "<|start|>assistant".join(
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
                for name, arguments in calls
            )
        case "granite":
            return f"<|tool_call|>[{', '.join(map(_json_call, calls))}]"
        case "deepseek_v3":
            return (
                deepseek("[calls_begin]")
                + deepseek("[call_end]\n").join(
                    f"{deepseek('[call_begin]')}function{deepseek('[sep]')}{name}\n```json\n{_json(arguments)}\n```"
                    for name, arguments in calls
                )
                + deepseek("[call_end][calls_end]")
            )
        case "deepseek_v31":
            each = (
                deepseek("[call_begin]") + name + deepseek("[sep]") + _json(arguments) + deepseek("[call_end]")
                for name, arguments in calls
            )
            return deepseek("[calls_begin]") + "".join(each) + deepseek("[calls_end]")
        case "gemma4":
            return "".join(
                f"<|tool_call>call:{name}{gemma_value(arguments, QUOTE)}<tool_call|>" for name, arguments in calls
            )
        case "functiongemma":
            return "".join(
                f"<start_function_call>call:{name}{gemma_value(arguments, '<escape>')}<end_function_call>"
                for name, arguments in calls
            )
    raise ValueError(family)


QUOTE = '<|"|>'
