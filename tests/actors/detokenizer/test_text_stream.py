"""From ids to text: pieces that come out must join to what the whole would have been."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.detokenizer.decoder import ByteDecoder
from quipu.actors.detokenizer.stop_strings import StopStrings
from quipu.actors.detokenizer.text_stream import Piece, StopMatcher, TextStream

LETTERS = st.text(alphabet="abé🌍", max_size=24)
STOPS = st.lists(st.text(alphabet="abé🌍", min_size=1, max_size=4), max_size=4)


def cut_at_stop(text: str, stops: list[str], *, include: bool, num_deaf: int = 0) -> tuple[str, bool]:
    """The oracle: read on one character at a time until a stop string is complete; of several, the longest.

    One that ends among the first `num_deaf` characters is none.
    """
    for end in range(num_deaf + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return (text[:end] if include else text[: end - max(map(len, complete))]), True
    return text, False


def stop_matcher(stops: list[str], *, include: bool = False, num_ignored: int = 0) -> StopMatcher:
    return StopMatcher(StopStrings(stops) if stops else None, include=include, num_ignored=num_ignored)


def cut_into(data: bytes, lengths: list[int]) -> list[bytes]:
    """`data` in pieces of the given lengths, the rest in one."""
    pieces, at = [], 0
    for length in lengths:
        pieces.append(data[at : at + length])
        at += length
    return [*pieces, data[at:]]


def run(
    pieces: list[bytes], stops: list[str], *, include: bool = False, num_ignored: int = 0
) -> tuple[list[str], bool]:
    """What a client is handed: one text a token, and whether a stop string ended it."""
    matcher = stop_matcher(stops, include=include, num_ignored=num_ignored)
    stream = TextStream(ByteDecoder(pieces), matcher)
    texts = []
    for token_id in range(len(pieces)):
        piece = stream.push(token_id)
        texts.append(piece.text)
        if piece.stopped:
            return texts, True
    last = stream.flush()
    return [*texts, last.text], last.stopped


@given(LETTERS, STOPS, st.lists(st.integers(0, 5), max_size=20), st.booleans())
def test_pieces_join_to_the_text_before_the_first_stop(
    text: str, stops: list[str], lengths: list[int], include: bool
) -> None:
    """However bytes are cut into tokens: nothing of a stop string slips out, nothing else is kept back."""
    texts, stopped = run(cut_into(text.encode(), lengths), stops, include=include)
    assert ("".join(texts), stopped) == cut_at_stop(text, stops, include=include)


@given(LETTERS, STOPS, st.lists(st.integers(0, 5), max_size=20), st.booleans(), st.integers(0, 20))
def test_no_stop_ends_before_the_minimum_of_tokens(
    text: str, stops: list[str], lengths: list[int], include: bool, minimum: int
) -> None:
    """One that begins there and ends later counts; what was handed out stays."""
    pieces = cut_into(text.encode(), lengths)
    num_deaf = len(b"".join(pieces[:minimum]).decode(errors="ignore"))
    texts, stopped = run(pieces, stops, include=include, num_ignored=minimum)
    assert ("".join(texts), stopped) == cut_at_stop(text, stops, include=include, num_deaf=num_deaf)


@given(LETTERS, STOPS, st.lists(st.integers(0, 5), max_size=20))
def test_nothing_is_held_back_without_cause(text: str, stops: list[str], lengths: list[int]) -> None:
    """After each token only a beginning of a stop string, or an unfinished character, is still held."""
    pieces = cut_into(text.encode(), lengths)
    stream = TextStream(ByteDecoder(pieces), stop_matcher(stops))
    handed, fed = "", b""
    for token_id, piece in enumerate(pieces):
        fed += piece
        out = stream.push(token_id)
        if out.stopped:
            return
        handed += out.text
        certain = fed.decode(errors="ignore")
        held = certain.removeprefix(handed)
        assert certain == handed + held
        assert not held or any(stop.startswith(held) for stop in stops)


@given(st.lists(st.binary(max_size=5), max_size=12))
def test_any_bytes_become_what_they_are_as_a_whole(pieces: list[bytes]) -> None:
    """Invalid UTF-8 becomes U+FFFD exactly as if it had been decoded at once."""
    texts, stopped = run(pieces, [])
    assert "".join(texts) == b"".join(pieces).decode(errors="replace")
    assert not stopped


def test_a_character_comes_with_its_last_byte() -> None:
    """Not earlier as U+FFFD."""
    world = "🌍".encode()
    decoder = ByteDecoder([world[:1], world[1:3], world[3:] + b"!"])
    assert [decoder.push(i) for i in range(3)] == ["", "", "🌍!"]
    assert decoder.flush() == ""


def test_a_character_that_never_ends_is_replaced_at_the_end() -> None:
    """One U+FFFD for what was begun; an id outside the vocabulary shows nothing."""
    decoder = ByteDecoder(["🌍".encode()[:3]])
    assert decoder.push(0) == ""
    assert decoder.push(5) == ""
    assert decoder.flush() == "\ufffd"


def test_a_stop_within_another_s_beginning_may_be_too_early() -> None:
    """What is held back of the first tokens is still theirs when the next one comes."""
    assert run([b"abc", b"x"], ["abcd", "bc"], num_ignored=1) == (["", "abcx", ""], False)
    assert run([b"abc", b"xbc"], ["abcd", "bc"], num_ignored=1) == (["", "abcx"], True)


def test_the_stop_that_is_complete_first_decides() -> None:
    """Not the one that begins first, nor the one named first."""
    assert stop_matcher(["abcd", "c"]).push("xabcdy") == Piece("xab", match="c")
    assert stop_matcher(["c", "bc", "xc"]).push("abcd") == Piece("a", match="bc")


def test_a_stop_across_tokens() -> None:
    """Its beginning is held back until it is decided, also where the first attempt was none."""
    matcher = stop_matcher(["aab"])
    assert matcher.push("xa") == Piece("x")
    assert matcher.push("a") == Piece("")
    assert matcher.push("a") == Piece("a")
    assert matcher.push("bz") == Piece("", match="aab")


def test_a_beginning_that_came_to_nothing_is_handed_out_at_the_end() -> None:
    """What was held back is text after all."""
    assert run([b"ab", b"c<", b"en"], ["<end>"]) == (["ab", "c", "", "<en"], False)


def test_a_replacement_character_can_complete_a_stop() -> None:
    """The cut-off character at the very end counts as what it becomes."""
    assert run([b"ab", b"\xf0"], ["b\ufffd"]) == (["a", "", ""], True)


@pytest.mark.parametrize(("include", "expected"), [(False, "x"), (True, "x\n\n")])
def test_a_stop_may_be_handed_out_too(include: bool, expected: str) -> None:
    """With `include` the client gets the stop string, and nothing after it."""
    texts, stopped = run([b"x\n", b"\nzzz"], ["\n\n"], include=include)
    assert ("".join(texts), stopped) == (expected, True)
