"""How models write calls in each format that the server knows: the text itself, where a template has only patterns.

Shipped formats have their syntaxes here; those of a checkpoint's own template follow from its delimiters, if its calls
are JSON or its dialect. What must always hold: the parser reads every call that is written like this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ...messages.call_syntax import NAME, ArgumentStyle, CallForm, CallSyntax
from .json_calls import ARGUMENT_KEYS
from .output_patterns import CharSet, Choice, Group, Node, Repeat, UnsupportedPattern, flat, parse_pattern
from .output_patterns import Sequence as Items
from .response_template import CallStyle
from .shipped_templates import deepseek_token
from .template_building import Spec, call_style

_MIN_TOKEN_CHARS = 3
"""Shorter tokens are words of the vocabulary, not delimiters."""


def _objects(opens: str = "", closes: str = "", **more: Any) -> CallSyntax:
    return CallSyntax(style=ArgumentStyle.OBJECT, open=opens, close=closes, **more)


def _list(begin: str, end: str = "]") -> CallSyntax:
    return _objects(begin=begin, between=", ", end=end)


def _dialect(opens: str, closes: str, quote: str) -> CallSyntax:
    return CallSyntax(
        style=ArgumentStyle.DIALECT, open=f"{opens}call:{NAME}", close=closes, name_pattern=r"\w+", quote=quote
    )


_DEEPSEEK_BEGIN, _DEEPSEEK_END = deepseek_token("tool calls begin"), deepseek_token("tool calls end")
_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = deepseek_token("tool call begin"), deepseek_token("tool call end")
_DEEPSEEK_SEPARATOR = deepseek_token("tool sep")


def _deepseek(opens: str, closes: str, between: str) -> CallSyntax:
    return CallSyntax(
        style=ArgumentStyle.JSON,
        begin=_DEEPSEEK_BEGIN,
        open=_DEEPSEEK_OPEN + opens,
        close=closes + _DEEPSEEK_CLOSE,
        between=between,
        end=_DEEPSEEK_END,
        name_pattern=r"[^\n<]+",
    )


_QWEN_CODER = CallSyntax(
    style=ArgumentStyle.TAGS,
    open=f"<tool_call>\n<function={NAME}>\n",
    close="</function>\n</tool_call>",
    between="\n",
    name_pattern=r"[^>\n]+",
    argument_open=f"<parameter={NAME}>\n",
    argument_close="\n</parameter>\n",
    value_ends=("</parameter>", "</function>"),
)
_HARMONY = CallSyntax(
    style=ArgumentStyle.JSON,
    open=f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>",
    close="<|call|>",
    between="<|start|>assistant",
    name_pattern=r"[^<\s]+",
)
_HARMONY_END = "<|end|>"
_LLAMA = _objects(between="; ", key="parameters")
_LLAMA_TAGGED = attrs.evolve(_LLAMA, begin="<|python_tag|>")
_MISTRAL_NAMED = CallSyntax(style=ArgumentStyle.JSON, open=f"[TOOL_CALLS]{NAME}[ARGS]", name_pattern=r"[^\[\]{}\s\"]+")

_SHIPPED: dict[str, dict[str, tuple[CallSyntax, ...]]] = {
    "deepseek_v3": {"": (_deepseek(f"function{_DEEPSEEK_SEPARATOR}{NAME}\n```json\n", "\n```", "\n"),)},
    "deepseek_v31": {"": (_deepseek(f"{NAME}{_DEEPSEEK_SEPARATOR}", "", ""),)},
    "functiongemma": {"": (_dialect("<start_function_call>", "<end_function_call>", "<escape>"),)},
    "gemma4": {"": (_dialect("<|tool_call>", "<tool_call|>", '<|"|>'),)},
    "granite": {"<|tool_call|>": (_list("<|tool_call|>["),), "": (_list("<tool_call>["),)},
    "hermes": {"": (_objects("<tool_call>\n", "\n</tool_call>", between="\n"),)},
    "llama3_json": {"<|python_tag|>": (_LLAMA, _LLAMA_TAGGED), "": (_LLAMA,)},
    "mistral": {"[ARGS]": (_MISTRAL_NAMED,), "": (_list("[TOOL_CALLS]["),)},
    "openai": {"": (_HARMONY,)},
    "phi4_mini_json": {
        "<|tool_call|>": (_list("<|tool_call|>[", "]<|/tool_call|>"),),
        "": (_list("functools["),),
    },
    "qwen3_coder": {"": (_QWEN_CODER,)},
}
"""By the token that a vocabulary must have for these syntaxes; the first that it has counts, and all have ""."""
_SHIPPED |= {"llama4_json": _SHIPPED["llama3_json"], "qwen3_xml": _SHIPPED["qwen3_coder"]}
_MARKERS = {
    "deepseek_v3": (_DEEPSEEK_BEGIN, _DEEPSEEK_OPEN),
    "deepseek_v31": (_DEEPSEEK_BEGIN, _DEEPSEEK_OPEN),
    "functiongemma": ("<start_function_call>",),
    "gemma4": ("<|tool_call>",),
    "granite": ("<|tool_call|>", "<tool_call>"),
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "phi4_mini_json": ("functools[", "<|tool_call|>"),
    "qwen3_coder": ("<tool_call>", "<function="),
    "qwen3_xml": ("<tool_call>", "<function="),
}


def shipped_form(name: str, added_ids: Mapping[str, int]) -> CallForm | None:
    """Return how calls of a shipped format are written, None if no grammar can be made of it."""
    for needed, syntaxes in _SHIPPED.get(name, {}).items():
        if not needed or needed in added_ids:
            form = _form(syntaxes, _MARKERS.get(name, ()), added_ids)
            return _with_messages(form, added_ids) if syntaxes == (_HARMONY,) else form
    return None


def _with_messages(form: CallForm, added_ids: Mapping[str, int]) -> CallForm:
    """Add the messages of gpt-oss that may come before calls, if what ends them is a token."""
    if _HARMONY_END not in added_ids:
        return form
    return attrs.evolve(
        form,
        token_ids={**form.token_ids, _HARMONY_END: added_ids[_HARMONY_END]},
        reasoning=("<|channel|>analysis<|message|>", f"{_HARMONY_END}<|start|>assistant"),
        answer_open="<|channel|>final<|message|>",
    )


def own_form(calls: Sequence[Spec], added_ids: Mapping[str, int]) -> CallForm | None:
    """Return how calls of a checkpoint's own template are written, None if the template does not tell."""
    try:
        syntaxes = tuple(_from_delimiters(call) for call in calls)
    except UnsupportedPattern:
        return None
    return _form(syntaxes, tuple(one.open.partition(NAME)[0].strip() for one in syntaxes), added_ids)


def _form(syntaxes: tuple[CallSyntax, ...], markers: tuple[str, ...], added_ids: Mapping[str, int]) -> CallForm:
    texts = [text for one in syntaxes for text in (one.begin, one.open, one.close, one.between, one.end, one.quote)]
    found = {
        token: token_id
        for token, token_id in added_ids.items()
        if len(token) >= _MIN_TOKEN_CHARS and any(token in text for text in texts)
    }
    return CallForm(syntaxes, found, markers)


def _from_delimiters(call: Spec) -> CallSyntax:
    style, arguments = call_style(call), call.get("content_args") or {}
    quote = _quote(arguments)
    if call.get("content") != "json" or (arguments and (not quote or style is CallStyle.OBJECT)):
        raise UnsupportedPattern("calls that are not JSON")
    opens, closes = _text(call, "open"), _text(call, "close")
    if not opens.partition(NAME)[0].strip():
        raise UnsupportedPattern("calls without an opening delimiter")
    if quote:
        return CallSyntax(style=ArgumentStyle.DIALECT, open=opens, close=closes, name_pattern=r"\w+", quote=quote)
    key = next((key for key in ARGUMENT_KEYS if f"content.{key}" in str(call.get("transform"))), ARGUMENT_KEYS[0])
    return CallSyntax(
        style=ArgumentStyle.OBJECT if style is CallStyle.OBJECT else ArgumentStyle.JSON,
        open=opens,
        close=closes,
        key=key,
        name_pattern=r"[\w.-]+",
        may_break=True,
    )


def _quote(arguments: Spec) -> str:
    """Return the delimiter of strings if keys are bare, else an empty string."""
    match arguments:
        case {"unquoted_keys": True, "string_delims": [[opens, closes]], **rest} if opens == closes and not rest:
            return str(opens)
    return ""


def _text(call: Spec, side: str) -> str:
    texts, pattern = call.get(side), call.get(f"{side}_pattern")
    if pattern is not None:
        return _shortest(parse_pattern(str(pattern)))
    return str(texts[0] if isinstance(texts, list) else texts or "")


def _shortest(node: Node) -> str:
    match node:
        case CharSet(chars=chars, classes=(), negated=False) if len(chars) == 1:
            return next(iter(chars))
        case Group(name="name"):
            return NAME
        case Repeat(item=item, least=least):
            return _shortest(item) * least if least else ""
        case Items(items=items):
            return "".join(map(_shortest, flat(items)))
        case Choice(options=options):
            return _shortest(options[0])
    raise UnsupportedPattern("a delimiter of more than one text")
