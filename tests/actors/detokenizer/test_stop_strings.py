"""The automaton finds the same stop strings as searching for each of them, at a bounded cost."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quipu.actors.detokenizer.stop_strings import NODE_BYTES, ROOT, StopStrings
from quipu.actors.detokenizer.text_stream import Piece, StopMatcher

SMALL = st.text(alphabet="ab", min_size=1, max_size=9)
STOPS = st.lists(SMALL, min_size=1, max_size=6)


class Searching:
    """Searches all held text for every stop string, each time: the oracle."""

    def __init__(self, stops: list[str], *, include: bool, num_ignored: int) -> None:
        self._stops = stops
        self._include = include
        self.held = ""
        self._num_ignored = num_ignored
        self._num_deaf_chars = 0

    def push(self, text: str) -> Piece:
        buffer = self.held + text
        if self._num_ignored:
            self._num_ignored -= 1
            self._num_deaf_chars = len(buffer)
        deaf = self._num_deaf_chars
        found = [(at, stop) for stop in self._stops if (at := buffer.find(stop, max(0, deaf + 1 - len(stop)))) >= 0]
        if found:
            at, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
            self.held = ""
            return Piece(buffer[: at + len(stop)] if self._include else buffer[:at], match=stop, is_complete=True)
        keep = max(
            length
            for stop in self._stops
            for length in range(len(stop))
            if length <= len(buffer) and buffer.endswith(stop[:length])
        )
        self.held = buffer[len(buffer) - keep :]
        self._num_deaf_chars = max(0, deaf + keep - len(buffer))
        return Piece(buffer[: len(buffer) - keep])


@given(STOPS, st.lists(st.text(alphabet="abc", max_size=6), max_size=12), st.booleans(), st.integers(0, 6))
@example(["ab", "abab", "b"], ["aba", "b", "ab"], False, 1)
def test_same_pieces_as_a_search(stops: list[str], texts: list[str], include: bool, num_ignored: int) -> None:
    """Each piece, the stop string and the rest are the same: with overlaps, ignored pieces, `include` or not."""
    automaton = StopStrings(stops)
    expected = Searching(stops, include=include, num_ignored=num_ignored)
    matcher = StopMatcher(automaton, include=include, num_ignored=num_ignored)
    for text in texts:
        piece = expected.push(text)
        assert matcher.push(text) == piece
        if piece.is_complete:
            assert matcher.flush() == ""
            return
    assert matcher.flush() == expected.held


@given(STOPS, st.lists(st.tuples(st.integers(0, 2), st.text(alphabet="ab", max_size=4)), max_size=20))
def test_sequences_share_one_automaton(stops: list[str], turns: list[tuple[int, str]]) -> None:
    """Each sequence has its own position in a shared automaton, however far others have advanced."""
    automaton = StopStrings(stops)
    shared = [StopMatcher(automaton) for _ in range(3)]
    alone = [StopMatcher(StopStrings(stops)) for _ in range(3)]
    for index, text in turns:
        assert shared[index].push(text) == alone[index].push(text)


class Counting(StopStrings):
    """Counts steps, including those that building takes."""

    num_steps = 0

    def step(self, node: int, character: str) -> int:
        self.num_steps += 1
        return super().step(node, character)


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_cost_of_partial_matches(num_sequences: int) -> None:
    """With 4,095 held characters of sixteen stop strings, each character costs one step, and building one per node."""
    stops = [chr(ord("a") + index) * 3 + "x" * 4092 + str(index) for index in range(16)]
    automaton = Counting(stops)
    text = "aaa" + "x" * 4092
    for _ in range(num_sequences):
        matcher = StopMatcher(automaton)
        assert "".join(matcher.push(character).text for character in text) == ""
        assert matcher.push("y").text == text + "y"
    num_nodes = sum(map(len, stops))
    assert automaton.num_steps <= num_nodes + num_sequences * (len(text) + 1)


def test_automaton_is_built_lazily() -> None:
    """A request costs only a few comparisons at its start; a text that matches nothing builds nothing more."""
    automaton = Counting([character * 4096 for character in "abcdefghijklmnop"])
    assert StopMatcher(automaton).push("0123456789" * 100).text == "0123456789" * 100
    assert automaton.num_steps == 1000


@given(STOPS)
def test_memory_per_character(stops: list[str]) -> None:
    """The memory besides the strings is at most `NODE_BYTES` per character."""
    assert StopStrings(stops).num_bytes <= NODE_BYTES * (2 + sum(map(len, stops)))


@given(STOPS, st.text(alphabet="ab", max_size=30))
def test_node_is_the_longest_prefix(stops: list[str], text: str) -> None:
    """After each character, the node is the longest prefix of a stop string that the text ends with."""
    automaton = StopStrings(stops)
    prefixes = {stop[:length] for stop in stops for length in range(len(stop) + 1)}
    node = ROOT
    for end, character in enumerate(text, 1):
        node = automaton.step(node, character)
        longest = max((p for p in prefixes if text[:end].endswith(p)), key=len)
        assert automaton.prefix(node, len(longest)) == longest
        assert automaton.depth(node) == len(longest)


def test_exception_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a step raises while the automaton is being built, later steps are right: other sequences share it."""
    stops = StopStrings(["abab", "abba"])
    find_children = StopStrings._children  # noqa: SLF001 -- a fault is planted
    calls: list[int] = []

    def failing(self: StopStrings, node: int) -> list[tuple[str, int]]:
        calls.append(node)
        if len(calls) == 3:
            raise MemoryError
        return find_children(self, node)

    monkeypatch.setattr(StopStrings, "_children", failing)
    with pytest.raises(MemoryError):
        StopMatcher(stops).push("xabba")
    assert StopMatcher(stops).push("xabba") == Piece("x", "abba", is_complete=True)
