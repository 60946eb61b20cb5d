"""Makes applications for less: what depends on the code alone is worked out once for all of them, or when it is used.

The code that builds the URLs of a rule is compiled when it is used, which it never is: it is most of the time that it
takes to make an application, a tenth of a second of a server's start. Rules without variables are taken apart only once
in a process: thousands of tests make an application.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from werkzeug.routing import Rule

BUILDER, PARSER = "_compile_builder", "_parse_rule"


@contextmanager
def lazy_builders() -> Iterator[None]:
    """Have rules that are added in this block compile on use, and share what they consist of."""
    compile_builder, parse_rule = vars(Rule)[BUILDER], vars(Rule)[PARSER]
    kept: dict[str, tuple[list[Any], list[tuple[bool, str]]]] = {}

    def compile_on_use(rule: Rule, append_unknown: bool = True) -> Any:
        def build(rule: Rule, *arguments: Any) -> Any:
            return compile_builder(rule, append_unknown)(rule, *arguments)

        return build

    def parse_once(rule: Rule, text: str) -> Iterator[Any]:
        if "<" in text:  # its converters belong to the application
            yield from parse_rule(rule, text)
            return
        if text not in kept:
            before = len(rule._trace)
            kept[text] = list(parse_rule(rule, text)), rule._trace[before:]
        else:
            rule._trace += kept[text][1]
        yield from kept[text][0]

    with mock.patch.multiple(Rule, **{BUILDER: compile_on_use, PARSER: parse_once}):
        yield
