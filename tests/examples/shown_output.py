"""What a console of the documents shows, compared with what its command printed: only what varies may differ.

Ids, digests, times and widths of columns always vary; numbers vary where they are those of a server that other pages
have used too. A line of dots stands for any lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_VARIES = (
    (re.compile(r"\b(req|srv|resp|batch|file)-(?:[0-9a-f]{4,}…?|…|\.\.\.)"), r"\1-ID"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?"), "TIME"),
    (re.compile(r"\b\d+(?:\.\d+)? (ms|s)\b"), r"N \1"),
    (re.compile(r"http://(?:127\.0\.0\.1|localhost):\d+"), "URL"),
    (re.compile(r"[ \t]+"), " "),
)
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")
ELIDED = ("...", "…")


def same_form(line: str, *, compares_numbers: bool) -> str:
    """Return a line with words in place of what varies."""
    for pattern, word in _VARIES:
        line = pattern.sub(word, line)
    return (line if compares_numbers else _NUMBER.sub("N", line)).strip()


def unlike(shown: str, printed: str, *, compares_numbers: bool) -> Iterator[str]:
    """Yield the lines that are shown and were not printed, and, unless some are elided, those printed and not shown.

    The order counts only within what is the same, since standard output and standard error come apart.
    """

    def lines_of(text: str) -> list[str]:
        return [line for one in text.splitlines() if (line := same_form(one, compares_numbers=compares_numbers))]

    wanted, found = lines_of(shown), lines_of(printed)
    elides = any(line in ELIDED for line in wanted)
    for line in wanted:
        if line in found:
            found.remove(line)
        elif line not in ELIDED:
            yield f"not printed: {line}"
    if not elides:
        yield from (f"not shown: {line}" for line in found)


def rows_of_doctor(text: str) -> list[str]:
    """Return the names in the table of `quipu doctor`, whatever its verdicts are."""
    return re.findall(r"^(?:ok|warning|problem) +(\w+) ", text, re.MULTILINE)
