"""Delimiters are found where a search finds them, at a bounded cost per character."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.detokenizer.response_parsing.delimiter_programs import Delimiter, DelimiterPrograms, Meaning
from quipu.actors.detokenizer.response_parsing.delimiter_scanner import MAX_HELD, DelimiterScanner, Hold
from quipu.actors.detokenizer.response_parsing.output_patterns import UnsupportedPattern, parse_pattern

PATTERNS = [
    "<a>",
    r"a(?:bc)?",
    r"<(?P<name>[^>\n]+)>",
    r"x\s*y",
    r"a|abc|b{2,3}",
    r"a+b?",
    r"[a-c\s]{2}x",
    r"\w+:",
    r"<.a",
]


def programs_of(*patterns: str) -> DelimiterPrograms:
    return DelimiterPrograms(
        Delimiter(Meaning.TEXT_CLOSE, parse_pattern(pattern), number) for number, pattern in enumerate(patterns)
    )


def split(programs: DelimiterPrograms, pieces: Iterable[str], hold: Hold = Hold.NOTHING) -> list[str | tuple[str, ...]]:
    """Return the text between delimiters as strings, and each delimiter's space, text and capture as a tuple."""
    scanner = DelimiterScanner(programs, hold)
    found: list[str | tuple[str, ...]] = [""]
    for piece in [*pieces, None]:
        rest: str | None = piece
        while True:
            scan = scanner.finish() if rest is None else scanner.feed(rest)
            assert isinstance(found[-1], str)
            found[-1] += scan.text
            if scan.found is not None:
                found += [(scan.found.space, scan.found.text, scan.found.capture or ""), ""]
            if rest is None and scan.rest:  # text held back after a delimiter that might have become longer
                inner = split(programs, [scan.rest], hold)
                return [*found[:-1], *inner] if not found[-1] else [*found[:-1], found[-1] + str(inner[0]), *inner[1:]]
            rest = None if rest is None else scan.rest
            if not rest:
                break
    return found


def searched(pattern: str, text: str) -> list[str | tuple[str, ...]]:
    """Return the same as `split` by repeated search for the leftmost, then longest match: the oracle."""
    found: list[str | tuple[str, ...]] = []
    at = last = 0
    while at < len(text):
        ends = [end for end in range(at + 1, len(text) + 1) if re.compile(pattern, re.S).fullmatch(text, at, end)]
        if ends:
            match = re.compile(pattern, re.S).fullmatch(text, at, ends[-1])
            assert match is not None
            found += [text[last:at], ("", match[0], match.groupdict().get("name", ""))]
            at = last = ends[-1]
        else:
            at += 1
    return [*found, text[last:]]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=st.text(alphabet="abcxy<>: \n", max_size=25), size=st.integers(1, 5))
def test_finds_what_a_search_finds(pattern: str, text: str, size: int) -> None:
    """However the text is cut, the delimiters are the leftmost matches, and of these the longest."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert split(programs_of(pattern), pieces) == searched(pattern, text)


def test_the_longest_of_several_delimiters() -> None:
    """Of delimiters that begin at the same place, the longest is taken; otherwise the one that begins first."""
    programs = programs_of("<a>", "<a>b", "a>bcd")
    assert split(programs, "x<a>bcd") == ["x", ("", "<a>b", ""), "cd"]
    assert split(programs, "x<a>c") == ["x", ("", "<a>", ""), "c"]


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_bounded_white_space(size: int) -> None:
    """At most MAX_HELD characters of white space are held back and belong to a delimiter."""
    text = "a" + 2 * MAX_HELD * " " + "<a>"
    found = split(programs_of("<a>"), [text[at : at + size] for at in range(0, len(text), size)], Hold.SPACE)
    assert found == ["a" + MAX_HELD * " ", (MAX_HELD * " ", "<a>", ""), ""]


def test_one_line_break() -> None:
    """With NEWLINE, one line break in front belongs to the delimiter."""
    assert split(programs_of("<a>"), "x\n\n<a>\n", Hold.NEWLINE) == ["x\n", ("\n", "<a>", ""), "\n"]


@pytest.mark.parametrize("text", [20_000 * "<", 5_000 * "<f=<", "<f=" + 20_000 * "x", 3_000 * "<f=x\n"])
def test_bounded_cost(text: str) -> None:
    """For any text, the number of steps and the text held back are bounded."""
    programs = programs_of(r"\s*<f=(?P<name>[^>\n]+)>", "<f=x")
    scanner = DelimiterScanner(programs, Hold.SPACE)
    num_steps = 0
    while text:
        scan = scanner.feed(text[:50])
        text = scan.rest + text[50:]
        num_steps += 1
        assert len(scanner.held) <= MAX_HELD + 50
    assert num_steps < 7000


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)", "(?!a)", "(?<=a)b", r"(a)\1", "a*?b", "a++", "^a", "a$", r"\bword", "(?i)a", "a{1000}", "a*", "",
        "(a{100}){100}", "(?P<a>x)(?P<b>y)", "[[:alpha:]]", "(", "a)", "a{", "[a", r"\p{L}", "a**", "\\", "a|", "(?P<a",
        "(?P<a>", 30 * "(" + "a" + 30 * ")",
    ],
)  # fmt: skip
def test_refused_patterns(pattern: str) -> None:
    """Patterns that a linear automaton cannot match, and those that are too large, are refused."""
    with pytest.raises(UnsupportedPattern):
        programs_of(pattern)
