"""Compiles the code that builds the URLs of a rule when it is used, which it never is.

It is most of the time that it takes to make an application: a tenth of a second of a server's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from werkzeug.routing import Rule

NAME = "_compile_builder"


@contextmanager
def lazy_builders() -> Iterator[None]:
    """Have rules that are added in this block compile on use."""
    compile_builder = vars(Rule)[NAME]

    def compile_on_use(rule: Rule, append_unknown: bool = True) -> Any:
        def build(rule: Rule, *arguments: Any) -> Any:
            return compile_builder(rule, append_unknown)(rule, *arguments)

        return build

    with mock.patch.object(Rule, NAME, compile_on_use):
        yield
