"""Finds the names that a chat template may look up, which tell what the template supports.

The tokenizer converts what a template does not support to plain text, and the detokenizer has to read a model's calls
in the form in which the model has seen them, so both ask here. Nothing of the template runs.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, with which templates mark what a model has written, for training.

    It is rendered as its contents; as in transformers, what is set within is not known behind it.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


EXTENSIONS = (jinja2.ext.loopcontrols, GenerationBlocks)
"""What templates may use beyond plain Jinja."""


@attrs.frozen
class TemplateNames:
    variables: frozenset[str] = frozenset()
    """The template's own variables, and those that receive the chat."""
    attributes: frozenset[str] = frozenset()
    """What is looked up in an object by this very name, as in `message.role` and `message['role']`."""
    strings: frozenset[str] = frozenset()
    """Strings, which may be keys as well."""

    def __contains__(self, name: str) -> bool:
        return name in self.variables or name in self.attributes or name in self.strings

    @property
    def shows_calls(self) -> bool:
        """Whether the template shows calls. One that shows no tools may have a form for calls, but models are told
        of their tools, and how to call them, in plain text."""
        return "tools" in self and "tool_calls" in self


def names_in(source: str) -> TemplateNames:
    """Return the names in a template. Raises jinja2.TemplateSyntaxError."""
    tree = jinja2.Environment(extensions=EXTENSIONS).parse(source)  # noqa: S701 -- nothing is rendered
    items = (node.arg for node in tree.find_all(jinja2.nodes.Getitem))
    keys = (item.value for item in items if isinstance(item, jinja2.nodes.Const))
    strings = (node.value for node in tree.find_all(jinja2.nodes.Const))
    return TemplateNames(
        variables=frozenset(node.name for node in tree.find_all(jinja2.nodes.Name)),
        attributes=_texts(keys).union(node.attr for node in tree.find_all(jinja2.nodes.Getattr)),
        strings=_texts(strings),
    )


def _texts(values: Iterable[object]) -> frozenset[str]:
    return frozenset(value for value in values if isinstance(value, str))
