"""Patterns of ECMA 262, translated into the dialect of the grammar library."""

from __future__ import annotations

import datetime
import re

import pytest

from quipu.actors.grammars.pattern_groups import UnsupportedPattern
from quipu.actors.grammars.schema_patterns import DATE, library_pattern


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^a[bc]+d{2,}?$", "^a[bc]+d{2,}?$"),
        (r"\d\w\.\/\u00e9\x41", r"[0-9][0-9A-Za-z_]\.\/\x{E9}A"),
        ("{a}b{", r"\{a\}b\{"),
        (r"(?<x>a)|(?:(^b|c)d$)", "(?:a)|(?:(?:^b|c)d$)"),
        (r"\ud83d\ude00|\u{1F600}", r"\x{1F600}|\x{1F600}"),
        ("[a&&b~~c]", r"[a\x{26}\x{26}b\x{7E}\x{7E}c]"),
        ("[[a]", r"[\x{5B}a]"),
        ("[+--]", r"[\x{2B}-\x{2D}]"),
        (r"[\w-x]", r"[[0-9A-Za-z_]\x{2D}x]"),
        (r"\D[^\W]", "[^0-9][^[^0-9A-Za-z_]]"),
        ("[a-]", r"[a\x{2D}]"),
        (r"[\b\]\x01b]", r"[\x{8}\x{5D}b]"),
        ("[^]", "(?s:.)"),
        (r"\p{L}[\P{Lu}]", r"\p{L}[\P{Lu}]"),
        (r"\<\>", "<>"),
        ("(?i:a)", "(?i:a)"),
    ],
)
def test_pattern(pattern: str, expected: str) -> None:
    """Classes are written character by character; everything that both dialects share is unchanged."""
    assert library_pattern(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        (r"\A", r"`\A`"),
        (r"\z", r"`\z`"),
        (r"\x{61}", r"`\x`"),
        (r"[\q]", r"`\q`"),
        (r"\ud83d", r"`\ud83d`"),
        ("a++", "quantifier"),
        ("a{2}*", "quantifier"),
        ("a{,2}", "quantifier"),
        ("a{2,1}", "out of range"),
        (f"a{{{'9' * 5000}}}", "out of range"),
        ("(^|a)*", "nothing that a quantifier"),
        ("*a", "nothing that a quantifier"),
        ("a(b|^c)", "`^` behind"),
        ("(a|b$)c", "behind `$`"),
        ("(a", "unclosed group"),
        ("a)", "closes no group"),
        ("(" * 100, "too many groups"),
        ("(?!a)b", "look-ahead"),
        ("(?<=a)b", "look-behind"),
        ("(?s)a", "`(?s`"),
        (r"\ba", "word boundaries"),
        (r"(a)\1", "backreferences"),
        (r"(?<n>a)\k<n>", "backreferences"),
        (r"\p{Foo}", r"`\p{Foo}`"),
        ("".join(f"\\p{{{'_' * number}L}}" for number in range(18)), "more than 16 properties"),
        ("[]a]", "empty"),
        ("[b-a]", "order"),
        ("[a", "unclosed"),
        ("a\\", "backslash"),
        (r"\p", r"`\p`"),
        (r"\0", "control"),
        ("a\x7fb", "control"),
        (r"[\x01]", "control"),
    ],
)
def test_unsupported_pattern(pattern: str, told: str) -> None:
    """A pattern that the library would interpret differently is refused."""
    with pytest.raises(UnsupportedPattern, match=re.escape(told)):
        library_pattern(pattern)


def test_date() -> None:
    """The pattern matches the dates that Python knows, and no others."""
    for year in (0, 1, 4, 100, 400, 1000, 1900, 2000, 2021, 2024, 9996, 9999):
        for month in range(14):
            for day in (0, 1, 9, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                assert (re.fullmatch(DATE, text) is not None) == is_date(text), text


def is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True
