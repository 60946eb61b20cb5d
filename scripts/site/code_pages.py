"""Pages of the reference that are made of the code: its index, the Python API, the commands with their flags."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from unittest import mock

import quipu
from quipu.web.cli.cli import COMMANDS, main, make_parser
from quipu.web.cli.one_line_parser import commands_of

from .metrics_page import metrics_page

WIDTH = "100"


def code_pages() -> dict[str, str]:
    """Return the pages by their place in the reference."""
    return {
        "index.md": _INDEX,
        "python/index.md": python_page(),
        "commands.md": commands_page(),
        "metrics.md": metrics_page(),
    }


_INDEX = """\
# Reference

Made of the code, by `make docs`.

| page | about |
|---|---|
| [HTTP API](http/index.md) | every endpoint with its fields, answers and errors |
| [Python API](python/index.md) | what `quipu` exports |
| [Commands](commands.md) | `quipu` and its commands, with all flags |
| [Metrics](metrics.md) | what `/metrics` has |
| [Engine settings](../operate/settings.md) | the settings of an engine, with bounds and defaults |
| [Sampling](../use/sampling.md) | the sampling fields of requests |
| [Fields](../use/fields.md) | what becomes of each field of other servers |

```{toctree}
:hidden:

http/index
python/index
commands
metrics
```
"""


def python_page() -> str:
    """Return a page with every name that the package exports."""
    lines = ["# Python API", "", "With examples: [In Python](../../use/python.md).", ""]
    for name in quipu.__all__:
        is_error = issubclass(getattr(quipu, name), Exception)
        lines += [
            f"## {name}",
            "",
            "```{eval-rst}",
            f".. auto{'exception' if is_error else 'class'}:: quipu.{name}",
            "   :members:",
            "   :undoc-members:",
            "```",
            "",
        ]
    return "\n".join(lines)


def commands_page() -> str:
    """Return a page with the help of every command."""
    told = "`quipu` without a command says where to begin. Settings of engines: [settings](../operate/settings.md)."
    lines = ["# Commands", "", told, ""]
    for command in _commands():
        lines += [f"## quipu {' '.join(command)}".rstrip(), "", "```text", _help(*command), "```", ""]
    return "\n".join(lines)


def _commands() -> Iterator[tuple[str, ...]]:
    yield ()
    for name, parser in commands_of(make_parser(with_flags=COMMANDS)).items():
        yield (name,)
        yield from ((name, inner) for inner in commands_of(parser))


def _help(*command: str) -> str:
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": WIDTH, "NO_COLOR": "1"}),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        main([*command, "--help"])
    return out.getvalue().rstrip()
