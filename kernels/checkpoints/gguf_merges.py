"""The merges of a SentencePiece vocabulary in a GGUF file, which has scores instead. No torch.

Used by `gguf_tokenizer.py`. SentencePiece merges the adjacent pair whose token has the best score; a tokenizer that has
merges does the same with every way to make a token of two others, best score first.

What must always hold: time and memory are in proportion to the characters of the vocabulary and to the limits below,
whatever its tokens are: a run of every length of one letter has as many merges as the square of their number.
"""

from __future__ import annotations

from collections.abc import Iterator

from .gguf_file import shown

_MAX_MERGES = 2_000_000
"""Gemma 3, with 262,000 tokens, has 580,000."""
_MAX_MERGED_CHARACTERS = 64_000_000
_MAX_LOOKED_AT = 16_000_000
"""Tokens at the beginnings and ends of others."""


def find_merges(tokens: list[str], mergeable: list[int], scores: list[float]) -> list[list[str]]:
    """Return every way to make a token of two others, best score first. `mergeable` are numbers of tokens.

    Raises ValueError if there are too many.
    """
    texts = {tokens[number]: number for number in mergeable if tokens[number]}
    longest_beginning = _find_longest_beginnings(texts)
    longest_end = _find_longest_beginnings({text[::-1]: number for text, number in texts.items()})
    found: list[tuple[float, int, int, int, int]] = []
    num_characters = num_looked_at = 0
    for text, number in texts.items():
        beginnings = {len(tokens[other]): other for other in _follow(number, longest_beginning)}
        ends = {len(text) - len(tokens[other]): other for other in _follow(number, longest_end)}
        places = beginnings.keys() & ends.keys()
        found += ((-scores[number], number, beginnings[at], ends[at], at) for at in places)
        num_characters += len(places) * len(text)
        num_looked_at += len(beginnings) + len(ends)
        if len(found) > _MAX_MERGES or num_characters > _MAX_MERGED_CHARACTERS or num_looked_at > _MAX_LOOKED_AT:
            raise ValueError(
                f"key 'tokenizer.ggml.tokens' has tokens that consist of others in too many ways: {shown(text)}"
            )
    found.sort()
    return [[tokens[number][:at], tokens[number][at:]] for _, number, _, _, at in found]


def _follow(number: int, links: dict[int, int]) -> Iterator[int]:
    while (following := links.get(number)) is not None:
        number = following
        yield number


def _find_longest_beginnings(texts: dict[str, int]) -> dict[int, int]:
    """Return the longest other text that each begins with, both by number.

    Takes time in proportion to the characters of all texts, however long one of them is.
    """
    found: dict[int, int] = {}
    # in sorted order a text follows those that it begins with, and what else begins with them
    enclosing: list[str] = []
    for text in sorted(texts):
        while enclosing and not text.startswith(enclosing[-1]):
            enclosing.pop()
        if enclosing:
            found[texts[text]] = texts[enclosing[-1]]
        enclosing.append(text)
    return found
