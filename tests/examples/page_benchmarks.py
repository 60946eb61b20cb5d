"""The benchmarks that the documents name, in blocks, sentences and tables.

The test command parses their flags; `make test-long` runs them, with less to do (`test_page_benchmarks.py`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import takewhile

from .page_blocks import PAGES, ROOT, commands_of
from .page_parsing import spelled_out

_BENCHMARK = re.compile(r"(?:[A-Z_]+=\S+ )*python3? -m bench\.")
STAND_INS = {"TRACE": "trace.jsonl", "FILE": "trace.jsonl", "BEFORE": str(ROOT), "FOLDER": ".", "NAME": "nothing"}
"""What takes the place of values in capitals. With `--quick` no trace is read."""
_STREAMS_TOO_SHORT = (
    "the demo model's short streams need not overlap: tests/bench/test_commands_run.py has the fake executor"
)
NOT_RUN: Mapping[str, str] = {
    "python -m bench.engine_overhead": _STREAMS_TOO_SHORT,
    "python -m bench.engine_overhead --json --quick --rounds 5": _STREAMS_TOO_SHORT,
    "python -m bench.speculation --beside quipu vllm": "needs vLLM",
    "python -m bench.vllm_runner --gpu --quick": "needs a GPU",
    "python -m bench.model_table --write": "changes the page; tests/bench/test_commands_run.py runs it without",
    "python -m bench.stalls --fuzz 2000": "`make test-long` runs it with 50000",
}
"""Benchmarks that are only parsed, and why."""


def benchmarks() -> list[str]:
    """Return each command line of a benchmark once, spelled out."""
    return sorted({line for page in PAGES for line in _benchmarks_of(page)})


def parts_of(line: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables of a command line, and its module with its arguments."""
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in takewhile(lambda word: "=" in word, words))
    return variables, words[len(variables) + 2 :]


def _benchmarks_of(page: str) -> Iterator[str]:
    for command in commands_of(page):
        if _BENCHMARK.match(command):
            for line in spelled_out(command):
                yield " ".join(STAND_INS.get(word, word) for word in line.split())
