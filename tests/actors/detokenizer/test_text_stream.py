"""From token ids to text: the pieces add up to the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.detokenizer.decoder import ByteDecoder
from quipu.actors.detokenizer.stop_strings import StopStrings
from quipu.actors.detokenizer.text_stream import Piece, StopMatcher, TextStream

LETTERS = st.text(alphabet="abé🌍", max_size=24)
STOPS = st.lists(st.text(alphabet="abé🌍", min_size=1, max_size=4), max_size=4)


def cut_at_stop(text: str, stops: list[str], *, include: bool, num_ignored: int = 0) -> tuple[str, bool]:
    """Read character by character until a stop string is complete; of several, take the longest: the oracle.

    Those that complete within the first `num_ignored` characters do not count.
    """
    for end in range(num_ignored + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return (text[:end] if include else text[: end - max(map(len, complete))]), True
    return text, False


def stop_matcher(stops: list[str], *, include: bool = False, num_ignored: int = 0) -> StopMatcher:
    return StopMatcher(StopStrings(stops) if stops else None, include=include, num_ignored=num_ignored)


def cut_into(data: bytes, lengths: list[int]) -> list[bytes]:
    """Split `data` into pieces of the given lengths, and the rest."""
    pieces, at = [], 0
    for length in lengths:
        pieces.append(data[at : at + length])
        at += length
    return [*pieces, data[at:]]


def run(
    pieces: list[bytes], stops: list[str], *, include: bool = False, num_ignored: int = 0
) -> tuple[list[str], bool]:
    """Return the text released per token, and whether a stop string was found."""
    matcher = stop_matcher(stops, include=include, num_ignored=num_ignored)
    stream = TextStream(ByteDecoder(pieces), matcher)
    texts = []
    for token_id in range(len(pieces)):
        piece = stream.push(token_id)
        texts.append(piece.text)
        if piece.is_complete:
            return texts, True
    last = stream.flush()
    return [*texts, last.text], last.is_complete


@given(LETTERS, STOPS, st.lists(st.integers(0, 5), max_size=20), st.booleans())
def test_pieces_add_up_to_the_text_before_the_first_stop(
    text: str, stops: list[str], lengths: list[int], include: bool
) -> None:
    """However the bytes are split into tokens, no part of a stop string is released and all other text is."""
    texts, stopped = run(cut_into(text.encode(), lengths), stops, include=include)
    assert ("".join(texts), stopped) == cut_at_stop(text, stops, include=include)


@given(LETTERS, STOPS, st.lists(st.integers(0, 5), max_size=20), st.booleans(), st.integers(0, 20))
def test_stop_strings_within_the_ignored_tokens(
    text: str, stops: list[str], lengths: list[int], include: bool, minimum: int
) -> None:
    """A stop string that begins within the ignored tokens and completes later counts, but released text stays."""
    pieces = cut_into(text.encode(), lengths)
    num_ignored = len(b"".join(pieces[:minimum]).decode(errors="ignore"))
    texts, stopped = run(pieces, stops, include=include, num_ignored=minimum)
    assert ("".join(texts), stopped) == cut_at_stop(text, stops, include=include, num_ignored=num_ignored)


@given(LETTERS, STOPS, st.lists(st.integers(0, 5), max_size=20))
def test_no_more_is_held_back_than_needed(text: str, stops: list[str], lengths: list[int]) -> None:
    """After each token only the beginning of a stop string, or an incomplete character, is held back."""
    pieces = cut_into(text.encode(), lengths)
    stream = TextStream(ByteDecoder(pieces), stop_matcher(stops))
    handed, fed = "", b""
    for token_id, piece in enumerate(pieces):
        fed += piece
        out = stream.push(token_id)
        if out.is_complete:
            return
        handed += out.text
        certain = fed.decode(errors="ignore")
        held = certain.removeprefix(handed)
        assert certain == handed + held
        assert not held or any(stop.startswith(held) for stop in stops)


@given(st.lists(st.binary(max_size=5), max_size=12))
def test_invalid_utf8(pieces: list[bytes]) -> None:
    """Invalid UTF-8 becomes U+FFFD exactly as if it were decoded at once."""
    texts, stopped = run(pieces, [])
    assert "".join(texts) == b"".join(pieces).decode(errors="replace")
    assert not stopped


def test_character_is_released_with_its_last_byte() -> None:
    """An incomplete character is held back, not released as U+FFFD."""
    world = "🌍".encode()
    decoder = ByteDecoder([world[:1], world[1:3], world[3:] + b"!"])
    assert [decoder.push(i) for i in range(3)] == ["", "", "🌍!"]
    assert decoder.flush() == ""


def test_incomplete_character_at_the_end() -> None:
    """An incomplete character becomes one U+FFFD; an id outside the vocabulary has no text."""
    decoder = ByteDecoder(["🌍".encode()[:3]])
    assert decoder.push(0) == ""
    assert decoder.push(5) == ""
    assert decoder.flush() == "\ufffd"


def test_ignored_stop_within_the_beginning_of_another() -> None:
    """Text held back from ignored tokens is still ignored when the next token arrives."""
    assert run([b"abc", b"x"], ["abcd", "bc"], num_ignored=1) == (["", "abcx", ""], False)
    assert run([b"abc", b"xbc"], ["abcd", "bc"], num_ignored=1) == (["", "abcx"], True)


def test_first_complete_stop_string_counts() -> None:
    """The stop string that is complete first counts, not the one that begins or is listed first."""
    assert stop_matcher(["abcd", "c"]).push("xabcdy") == Piece("xab", match="c", is_complete=True)
    assert stop_matcher(["c", "bc", "xc"]).push("abcd") == Piece("a", match="bc", is_complete=True)


def test_stop_string_across_tokens() -> None:
    """The beginning of a stop string is held back until the match is decided, even after a failed attempt."""
    matcher = stop_matcher(["aab"])
    assert matcher.push("xa") == Piece("x")
    assert matcher.push("a") == Piece("")
    assert matcher.push("a") == Piece("a")
    assert matcher.push("bz") == Piece("", match="aab", is_complete=True)


def test_partial_match_is_released_at_the_end() -> None:
    """Held text without a complete stop string is released."""
    assert run([b"ab", b"c<", b"en"], ["<end>"]) == (["ab", "c", "", "<en"], False)


def test_replacement_character_can_complete_a_stop_string() -> None:
    """An incomplete character at the end counts as U+FFFD."""
    assert run([b"ab", b"\xf0"], ["b\ufffd"]) == (["a", "", ""], True)


@pytest.mark.parametrize(("include", "expected"), [(False, "x"), (True, "x\n\n")])
def test_include_releases_the_stop_string(include: bool, expected: str) -> None:
    """With `include` the stop string is released, and nothing after it."""
    texts, stopped = run([b"x\n", b"\nzzz"], ["\n\n"], include=include)
    assert ("".join(texts), stopped) == (expected, True)
