"""The code of the documents: blocks, with their place, language and text, and the commands in sentences."""

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
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
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


def commands_of(page: str) -> Iterator[str]:
    """Yield the lines of a page's blocks, and what stands in backquotes in its sentences and tables."""
    for block in blocks_of(page):
        yield from (line.removeprefix("$ ") for line in logical_lines(block.text))
    yield from code_in_sentences(page)


def code_in_sentences(page: str) -> Iterator[str]:
    """Yield what stands in backquotes in the sentences and tables of a page."""
    for paragraph in _FENCE.sub("", (ROOT / page).read_text("utf-8")).split("\n\n"):
        yield from (" ".join(code.split()) for code in _INLINE.findall(paragraph))


def logical_lines(text: str) -> list[str]:
    """Return the lines of a block; one that ends with a backslash, or goes on with `[--flag]`, is one with the next."""
    return re.sub(r"\\\n\s*|\n\s+(?=\[)", " ", text).splitlines()


def has_indented_code(page: str) -> bool:
    """Return whether a page has a block that is marked by its indentation alone, outside of lists."""
    text = _FENCE.sub("", (ROOT / page).read_text("utf-8"))
    return any(not _in_list(text[: found.start()]) for found in _INDENTED.finditer(text))


def _in_list(before: str) -> bool:
    paragraph = before.rpartition("\n\n")[2]
    return bool(re.match(r"\s*(?:[-*]|\d+\.) |\s{2,}", paragraph))
