"""`quipu serve`: help and mistakes are answered before the server is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from .one_line_parser import OneLineParser
from .serve_flags import add_serve_flags

_EXAMPLES = """\
examples:
  quipu serve demo
  quipu serve Qwen/Qwen3-0.6B --kv-cache-memory 4GiB --max-model-len 8192
  quipu serve ./checkpoint --host 0.0.0.0 --key-file keys.toml --engines 2
`quipu doctor` says what this machine can do, `quipu models` which models on it can be served.\
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` is without `serve`. Returns the exit code."""
    arguments = make_parser().parse_args(argv)
    from .serve import run_serve

    return run_serve(arguments)


def make_parser() -> OneLineParser:
    # Another server's flag may be the beginning of one of ours that means something else.
    description = "Serve a model over the OpenAI and Anthropic APIs."
    parser = OneLineParser(prog="quipu serve", description=description, epilog=_EXAMPLES, allow_abbrev=False)
    add_serve_flags(parser)
    return parser
