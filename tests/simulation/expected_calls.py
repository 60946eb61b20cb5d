"""What a right server reads in an output that may reason and call tools, said again in a few lines for what it writes.

    <think>abc</think>some text<tool_call>
    {"name": "find", "arguments": {"word": "ab"}}
    </tool_call>more text

White space around calls is nobody's, so that texts are compared without any.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import attrs

from tests.simulation.expected_thoughts import END_OF_THOUGHT, THOUGHT

_OPENING = re.compile(r'<tool_call>\s*\{"name": ?"(\w+)"')
"""From here on a call is certain."""
_BEFORE_ARGUMENTS = re.compile(r', ?"arguments": ?')
_ARGUMENTS = re.compile(r"\{[^{}]*\}")
_WHOLE = re.compile(r'<tool_call>\s*\{"name": ?"(\w+)", ?"arguments": ?\{[^{}]*\}\}')
CLOSING = "</tool_call>"


@attrs.frozen
class Call:
    name: str
    arguments: str
    is_whole: bool


@attrs.frozen
class Reading:
    content: str
    """The text outside of calls, without white space."""
    calls: tuple[Call, ...]
    reasoning: str = ""
    """The same of the reasoning."""


def call_ends(text: str, tools: Collection[str]) -> list[int]:
    """Return where the calls of these tools end that are whole."""
    return [found.end() for found in _WHOLE.finditer(text) if found[1] in tools]


def read_output(text: str, tools: Collection[str], *, is_amid_reasoning: bool = False) -> Reading:
    """Return the calls of these tools in a text, and what else there is. It may begin amid reasoning."""
    reasoning = ""
    if is_amid_reasoning or text.startswith(THOUGHT):
        reasoning, _, text = text.removeprefix(THOUGHT).partition(END_OF_THOUGHT)
    content, calls, at = "", [], 0
    for found in _OPENING.finditer(text):
        if found[1] not in tools:
            continue
        content += text[at : found.start()]
        at = len(text)
        before = _BEFORE_ARGUMENTS.match(text, found.end())
        if before is None:
            calls.append(Call(found[1], "", is_whole=False))
            break
        arguments = _ARGUMENTS.match(text, before.end())
        if arguments is None:
            calls.append(Call(found[1], text[before.end() :], is_whole=False))
            break
        is_whole = text.startswith("}", arguments.end())
        calls.append(Call(found[1], arguments[0], is_whole))
        after = text[arguments.end() + 1 :].lstrip()
        if not is_whole or CLOSING.startswith(after):
            break
        at = len(text) - len(after.removeprefix(CLOSING))
    return Reading(squeezed(content + text[at:]), tuple(calls), squeezed(reasoning))


def squeezed(text: str) -> str:
    """Return a text without its white space."""
    return "".join(text.split())
