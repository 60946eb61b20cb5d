"""How a model writes its tool calls, for grammars that make it write some.

Chosen at start (`detokenizer/output_format.py`), used by the web layer with a request's tools
(`grammars/call_grammar.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

import attrs

NAME = "{name}"
"""Stands for a tool's name in a delimiter, and for an argument's."""


class ArgumentStyle(Enum):
    OBJECT = auto()
    """`{"name": …, "arguments": {…}}`."""
    JSON = auto()
    """A name in the opening delimiter, then JSON."""
    TAGS = auto()
    """A name in the opening delimiter, then each argument between delimiters of its own."""
    DIALECT = auto()
    """A name in the opening delimiter, then JSON with bare keys, and with `quote` around strings."""


@attrs.frozen(kw_only=True)
class CallSyntax:
    """One way to write calls: `begin`, the calls with `between` them, `end`."""

    style: ArgumentStyle
    open: str
    """Before each call."""
    close: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    key: str = "arguments"
    """Of the arguments in an OBJECT."""
    name_pattern: str = r"[^\0]+"
    """Which names the delimiter may have; the parser reads no others."""
    argument_open: str = ""
    argument_close: str = ""
    value_ends: tuple[str, ...] = ()
    """Texts that end an argument between delimiters, so that it cannot contain them."""
    quote: str = ""
    may_break: bool = False
    """A line break may stand next to a delimiter."""


@attrs.frozen
class CallForm:
    """All that a grammar needs to know of the model's calls."""

    syntaxes: tuple[CallSyntax, ...]
    """Alternatives: the model writes all calls of an answer in one of them."""
    token_ids: Mapping[str, int] = attrs.field(factory=dict)
    """The tokens in delimiters that the model writes as a whole."""
    markers: tuple[str, ...] = ()
    """What begins a call within text. Empty: a call may begin with no such text."""
    reasoning: tuple[str, str] | None = None
    """What opens and closes reasoning before forced calls, if that is part of their grammar: for formats in which no
    single text closes reasoning. The latter begins with a token."""
    answer_open: str = ""
    """May stand before an answer that is no call."""
