"""A plain port of the index and the cost that NVIDIA Dynamo's KV router documents, to compare decisions with.

Its index is a tree of blocks: a node has its children by block, and the workers that hold it. A prompt is walked from
the root down; each worker of a node on the way gets a point, and the walk ends where no worker is left. The cost of a
worker is what it would have to prefill, less what it has, plus the blocks that it decodes; the lowest wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.define(eq=False)
class Node:
    workers: set[int] = attrs.field(factory=set)
    children: dict[bytes, Node] = attrs.field(factory=dict)


class TreeIndex:
    def __init__(self) -> None:
        self._root = Node()

    def store(self, worker: int, keys: Sequence[bytes]) -> None:
        """Note that a worker holds a chain from its beginning."""
        node = self._root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node()
            child.workers.add(worker)
            node = child

    def match(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Return how many of the first `keys` each worker holds."""
        scores: dict[int, int] = {}
        node = self._root
        for key in keys:
            child = node.children.get(key)
            if child is None or not child.workers:
                break
            for worker in child.workers:
                scores[worker] = scores.get(worker, 0) + 1
            node = child
        return scores


class TreeRouter:
    """Chooses the worker of the lowest cost."""

    def __init__(self, num_workers: int) -> None:
        self.index = TreeIndex()
        self._prefill_blocks = [0] * num_workers
        self._decode_blocks = [0] * num_workers

    def choose(self, keys: Sequence[bytes], num_blocks: int) -> int:
        scores = self.index.match(keys)
        best, lowest = 0, float("inf")
        for worker, (prefill, decode) in enumerate(zip(self._prefill_blocks, self._decode_blocks, strict=True)):
            cost = max(prefill + num_blocks - scores.get(worker, 0), 0) + decode + num_blocks
            if cost < lowest:
                best, lowest = worker, cost
        self._prefill_blocks[best] += num_blocks - scores.get(best, 0)
        self._decode_blocks[best] += num_blocks
        return best
