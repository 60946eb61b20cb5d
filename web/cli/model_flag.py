"""The model of `quipu serve`, as an argument or, as for other servers, a flag.

What must always hold: a model that is given once counts, wherever it is given; two different ones are refused.
"""

from __future__ import annotations

import argparse
from typing import Any


class _Default(str):
    """A model that nobody has named."""

    __slots__ = ()


DEFAULT_MODEL = _Default("demo")


class ModelAction(argparse.Action):
    """Takes the model, unless that is the default and another one is known."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        known = getattr(namespace, self.dest, DEFAULT_MODEL)
        if isinstance(values, _Default):
            return
        if not isinstance(known, _Default) and known != values:
            parser.error(f"two models are named: {known} and {values}")
        setattr(namespace, self.dest, values)
