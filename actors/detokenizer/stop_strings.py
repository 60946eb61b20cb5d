"""The stop strings of one request as one automaton (Aho and Corasick, 1975), built only as deep as the text reaches.

Used by `text_stream.py`: all sequences of a request share the automaton, each with a position of its own. A node is a
prefix of some stop string, numbered so that the characters of each string are consecutive:

    stops  "abcd" "abx" "bc"      nodes  0 | a b c d | x | b c
                                          root  1 2 3 4   5   6 7      2 ─x─▶ 5 and 0 ─b─▶ 6 are branches

    fail   of a node: the node of the longest proper suffix of its prefix that is also a prefix
    ended  at a node: the longest stop string that its prefix ends with

What must always hold: a character costs amortized O(1) to match and, the first time that any sequence gets this deep,
one node per stop string; no character has a Python object, only `NODE_BYTES`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

NODE_BYTES = 12
"""The most memory that a character of a stop string takes, besides the string: its label and two numbers."""

_UNKNOWN = 0xFFFFFFFF
ROOT = 0
_NO_BRANCHES: dict[str, int] = {}


class StopStrings:
    def __init__(self, stops: Iterable[str]) -> None:
        """Compare whole strings a few times; `step` builds the rest. No stop string is empty."""
        self._labels = "\0"
        """The character that leads to each node."""
        self._branches: dict[int, dict[str, int]] = {}
        """Children of a node other than the next node."""
        self._chain_starts: list[int] = []
        """The first node of each chain, which is what a stop string adds to those sorted before it..."""
        self._chain_depths: list[int] = []
        """...the length of the prefix that it continues..."""
        self._chain_stops: list[str] = []
        """...and the stop string."""
        self._chain_tails: set[int] = set()
        """The last node of each chain: the next node is not its child."""
        self._stop_at: dict[int, str] = {}
        self._add_all(sorted(set(stops)))
        num_nodes = len(self._labels)
        self._labels += "\0"  # so that the last node has a next one, too
        self._fail = array("I", [_UNKNOWN]) * num_nodes
        self._ended = array("I", [_UNKNOWN]) * num_nodes
        """The node of a stop string, or ROOT. Both arrays are filled down to the depth reached so far."""
        self._fail[ROOT] = self._ended[ROOT] = ROOT
        self._frontier = [ROOT]
        """The nodes at that depth."""

    def _add_all(self, stops: list[str]) -> None:
        labels = [self._labels]
        num_nodes = 1
        path: list[tuple[int, int]] = []
        """For the previous stop string: the depths from which its nodes are consecutive, with the first node."""
        previous = ""
        for stop in stops:
            shared = _num_common(previous, stop)
            path = [part for part in path if part[0] < shared]
            parent = _node_at(path, shared)
            child = num_nodes
            labels.append(stop[shared:])
            num_nodes += len(stop) - shared
            if parent in self._chain_tails or child != parent + 1:
                self._branches.setdefault(parent, {})[stop[shared]] = child
            self._chain_starts.append(child)
            self._chain_depths.append(shared)
            self._chain_stops.append(stop)
            self._chain_tails.add(num_nodes - 1)
            self._stop_at[num_nodes - 1] = stop
            path.append((shared, child))
            previous = stop
        self._labels = "".join(labels)

    @property
    def num_bytes(self) -> int:
        """The memory used besides the strings."""
        return 4 * len(self._labels) + self._fail.itemsize * len(self._fail) + self._ended.itemsize * len(self._ended)

    # ------------------------------------------------------------ matching

    def step(self, node: int, character: str) -> int:
        """Return the node after `character`: that of the longest prefix that the text now ends with."""
        labels, fail = self._labels, self._fail
        while True:
            if labels[node + 1] == character and node not in self._chain_tails:
                node += 1
                break
            child = self._branches.get(node, _NO_BRANCHES).get(character)
            if child is not None:
                node = child
                break
            if node == ROOT:
                return ROOT
            node = fail[node]
        if fail[node] == _UNKNOWN:
            self._deepen()
        return node

    def _deepen(self) -> None:
        """Fill in the nodes below the frontier: no text gets further than one character beyond it."""
        deeper: list[int] = []
        for parent in self._frontier:
            for character, child in self._children(parent):
                # this never steps to a node deeper than the frontier
                fail = ROOT if parent == ROOT else self.step(self._fail[parent], character)
                self._fail[child] = fail
                self._ended[child] = child if child in self._stop_at else self._ended[fail]
                deeper.append(child)
        self._frontier = deeper  # last, so that an exception leaves nothing half filled for the other sequences

    def _children(self, node: int) -> list[tuple[str, int]]:
        children = list(self._branches.get(node, _NO_BRANCHES).items())
        if node not in self._chain_tails and node + 1 < len(self._fail):
            children.append((self._labels[node + 1], node + 1))
        return children

    # ------------------------------------------------------------ properties of a node

    def ended_at(self, node: int) -> str | None:
        """Return the longest stop string that this node's prefix ends with."""
        ended = self._ended[node]
        return None if ended == ROOT else self._stop_at[ended]

    def unfinished(self, node: int) -> int:
        """Return the node of the longest suffix of this node's prefix that a longer stop string starts with."""
        while node in self._chain_tails and node not in self._branches:
            node = self._fail[node]
        return node

    def depth(self, node: int) -> int:
        if node == ROOT:
            return 0
        chain = bisect_right(self._chain_starts, node) - 1
        return self._chain_depths[chain] + node - self._chain_starts[chain] + 1

    def prefix(self, node: int, length: int) -> str:
        """Return the first `length` characters of a node's prefix."""
        if node == ROOT:
            return ""
        chain = bisect_right(self._chain_starts, node) - 1
        return self._chain_stops[chain][: min(length, self.depth(node))]


def _num_common(a: str, b: str) -> int:
    return bisect_left(range(min(len(a), len(b))), True, key=lambda index: not b.startswith(a[: index + 1]))


def _node_at(path: list[tuple[int, int]], depth: int) -> int:
    """Return the node at `depth` of the stop string that `path` belongs to."""
    if depth == 0:
        return ROOT
    start, first = path[-1]
    return first + depth - start - 1
