"""The code blocks of the documents: where each is, its language and its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "docs/**/*.md", "bench/README.md")
    for path in ROOT.glob(pattern)
)
_FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
_INDENTED = re.compile(r"\n\n(?: {4}|\t)(?!\s*(?:[-*]|\d+\.) )\S")


@attrs.frozen
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the blocks of a page, in their order."""
    text = (ROOT / page).read_text("utf-8")
    for found in _FENCE.finditer(text):
        indent = len(found[1])
        inner = "".join(line[indent:] if line.strip() else "\n" for line in found[3].splitlines(keepends=True))
        yield Block(page, text.count("\n", 0, found.start()) + 1, found[2].strip(), inner)


def has_indented_code(page: str) -> bool:
    """Return whether a page has a block that is marked by its indentation alone, outside of lists."""
    text = _FENCE.sub("", (ROOT / page).read_text("utf-8"))
    return any(not _in_list(text[: found.start()]) for found in _INDENTED.finditer(text))


def _in_list(before: str) -> bool:
    paragraph = before.rpartition("\n\n")[2]
    return bool(re.match(r"\s*(?:[-*]|\d+\.) |\s{2,}", paragraph))
