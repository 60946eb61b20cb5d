"""How calls are written in each format: the shipped ones, and those that a checkpoint's own template defines."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from quipu.actors.detokenizer.output_format import choose_format
from quipu.actors.detokenizer.response_parsing.call_syntaxes import own_form, shipped_form
from quipu.actors.detokenizer.response_parsing.parser_choice import OWN, choose
from quipu.actors.detokenizer.response_parsing.shipped_templates import TOOL_CALLS
from quipu.actors.grammars.call_grammar import forced_calls
from quipu.actors.messages.call_syntax import CallForm
from quipu.actors.shared.checkpoint import DEMO
from quipu.actors.shared.tokenizers_library import load_library
from tests.byte_vocabulary import ByteVocabulary
from tests.call_grammars import SCHEMAS, TOOLS, Family, matches


def own(**call: Any) -> dict[str, Any]:
    return {"fields": {"tool_calls": {"repeats": True, "content": "json", **call}, "content": {}}}


OBJECT = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
RENAMED = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}}
CLEAR: list[dict[str, Any]] = [
    own(open="<call>", close="</call>", transform=OBJECT),
    own(open=["<call>", "<c>"], close=["</call>"], transform=RENAMED),
    own(open_pattern=r"\s*<call>\s*", close_pattern=r"\s*</call>", transform=OBJECT),
    own(open_pattern=r"(?:<a>|<b>)(?:x{2})(?P<name>\w+):", close="<end>", transform=NAMED),
    own(
        open_pattern=r"<(?P<name>\w+)>",
        close="<end>",
        transform=NAMED,
        content_args={"unquoted_keys": True, "string_delims": [["'", "'"]]},
    ),
]
UNCLEAR: list[dict[str, Any]] = [
    own(open_pattern=r"<[a-z]>", close="</call>", transform=OBJECT),
    own(open_pattern=r"(?P<name>\w+):", close="<end>", transform=NAMED),
    own(
        open_pattern=r"<(?P<name>\w+)>",
        close="<end>",
        transform=NAMED,
        content="xml-inline",
        content_args={"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
    ),
]


def form_of(template: dict[str, Any]) -> CallForm | None:
    chosen = choose("auto", "none", template, None, {})
    assert chosen.tool_call_parser == OWN, chosen.reason
    return own_form(chosen.own_calls, {"</call>": 256})


def test_every_shipped_format() -> None:
    """Calls can be forced in every format."""
    assert all(shipped_form(name, {}) is not None for name in TOOL_CALLS)


@pytest.mark.parametrize("template", CLEAR)
def test_own_templates(template: dict[str, Any]) -> None:
    """Calls written in the form derived from the checkpoint's own template are read as calls by that template."""
    form = form_of(template)
    assert form is not None
    chosen = choose("auto", "none", template, None, {})
    assert chosen.template is not None
    one = Family("own", ByteVocabulary(["</call>"]), form, chosen.template)
    rules = "".join(forced_calls(form, TOOLS, several=True))
    walks = [one.vocabulary.walk(rules, Random(seed)) for seed in range(6)]
    outputs = [output for output in walks if output is not None]
    assert outputs, "no walk reached an end of the grammar"
    for output in outputs:
        calls = one.calls(output)
        assert calls and all(matches(SCHEMAS[name], arguments) for name, arguments in calls)


@pytest.mark.parametrize("template", UNCLEAR)
def test_templates_without_a_form(template: dict[str, Any]) -> None:
    """If a delimiter is not one fixed text, or arguments are between tags, no call can be forced."""
    assert form_of(template) is None


def test_demo_model() -> None:
    """The demo checkpoint's calls can be forced, with its delimiters as tokens."""
    form = choose_format(DEMO, load_library(DEMO), "<tool_call>", "auto", "auto").output.call_form
    assert form is not None and set(form.token_ids) == {"<tool_call>", "</tool_call>"}
    assert choose_format(DEMO, load_library(DEMO), None, "none", "none").output.call_form is None
