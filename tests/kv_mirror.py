"""The consumer side of KV events: a `Mirror` built from them alone, and a `Subscriber` that fills one over sockets.

Written against the wire format, not against quipu's classes: payloads are decoded into plain lists and dicts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import attrs
import msgspec
import zmq

from quipu.actors.shared.block_keys import chain_keys

PATIENCE_S = 60.0
"""How long a test waits for a message; only a failing test waits this long."""
END = b"\xff" * 8

STORED = {
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size"),
    *("lora_id", "medium", "lora_name", "group_idx"),
}
REMOVED = {"type", "block_hashes", "medium", "group_idx"}


@attrs.define
class Mirror:
    """The contents of a prefix cache as reconstructed from its events. Asserts that events are consistent."""

    block_size: int
    blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = attrs.field(factory=dict)
    """(parent key or None, tokens), by key, of what is on the device."""
    lower: dict[str, dict[bytes, tuple[bytes | None, tuple[int, ...]]]] = attrs.field(
        factory=lambda: {"CPU": {}, "DISK": {}, "EXTERNAL": {}}
    )
    """The same of what is in each lower tier."""

    def apply(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            match event["type"]:
                case "BlockStored":
                    assert set(event) == STORED and event["block_size"] == self.block_size
                    tier = self._tier(event["medium"])
                    self._store(tier, event["block_hashes"], event["parent_block_hash"], event["token_ids"])
                case "BlockRemoved":
                    assert set(event) == REMOVED and event["block_hashes"]
                    tier = self._tier(event["medium"])
                    for key in event["block_hashes"]:
                        del tier[key]
                case "AllBlocksCleared":
                    assert set(event) == {"type"}
                    self.clear()
                case unknown:
                    raise AssertionError(f"unknown event: {unknown}")

    def _tier(self, medium: str) -> dict[bytes, tuple[bytes | None, tuple[int, ...]]]:
        return self.blocks if medium == "GPU" else self.lower[medium]

    def clear(self) -> None:
        self.blocks.clear()
        for tier in self.lower.values():
            tier.clear()

    def _store(
        self,
        tier: dict[bytes, tuple[bytes | None, tuple[int, ...]]],
        keys: list[bytes],
        parent: bytes | None,
        tokens: list[int],
    ) -> None:
        size = self.block_size
        assert keys and len(tokens) == len(keys) * size
        for index, key in enumerate(keys):
            assert key not in tier, "stored twice"
            tier[key] = (parent, tuple(tokens[index * size : (index + 1) * size]))
            parent = key

    def check(self, roots: Collection[bytes] | None) -> None:
        """Assert that every key is the hash of its parent and tokens, and that chains start at `roots`, if given."""
        for key, (parent, tokens) in [block for tier in (self.blocks, *self.lower.values()) for block in tier.items()]:
            assert roots is None or parent not in roots
            parents = roots if parent is None else [parent]
            assert parents is None or key in [chain_keys(p, tokens, self.block_size)[0] for p in parents]

    def prefix_of(self, tokens: list[int]) -> int:
        """Return how many leading tokens would be found, starting from any chain's root."""
        found, parent = 0, None
        anywhere = {key: block for tier in (*self.lower.values(), self.blocks) for key, block in tier.items()}
        children = {(parent, block): key for key, (parent, block) in anywhere.items()}
        while key := children.get((parent, tuple(tokens[found : found + self.block_size]))):
            parent, found = key, found + self.block_size
        return found


@attrs.frozen
class Batch:
    topic: bytes
    number: int
    ts: float
    events: list[dict[str, Any]]


def decode(topic: bytes, number: bytes, payload: bytes) -> Batch:
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert abs(time.time() - ts) < 600 and rank == 0 and len(number) == 8 and events
    return Batch(topic, int.from_bytes(number, "big"), ts, events)


class Subscriber:
    """Follows one publisher: detects gaps in the sequence numbers and fills them from the replay socket.

    A new engine counts from 0 again and may reach any number before its subscribers are connected. So whenever the
    connection was lost, the last known batch is requested again: a different one under its number means a new engine.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, block_size: int, topic: str = "") -> None:
        self.mirror = Mirror(block_size)
        self.next_number = 0
        self.num_restarts = 0
        self.gaps: list[tuple[int, int]] = []
        """(first missing number, first received number)"""
        self._taken: dict[int, float] = {}
        """Times of the batches applied, by number."""
        self._began = 0.0
        """Time of the engine's first batch; an earlier batch is from another engine."""
        self._was_lost = False
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(topic)
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sub.connect(endpoint)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(replay_endpoint)

    def close(self) -> None:
        self._sub.disable_monitor()
        self._context.destroy(linger=0)

    def receive(self, timeout_s: float = PATIENCE_S) -> bool:
        """Receive one live batch and fill any gap before it. Return False if none arrived in time."""
        if not self._sub.poll(timeout_s * 1000):
            return False
        self._follow(decode(*self._sub.recv_multipart()))
        return True

    def receive_while(self, wanted: Callable[[], bool], nudge: Callable[[], object] = lambda: None) -> None:
        """Receive while `wanted` returns true; `nudge` may make the publisher send something."""
        deadline = time.monotonic() + PATIENCE_S
        while wanted():
            assert time.monotonic() < deadline, "the expected events did not arrive"
            nudge()
            self.receive(0.02)

    def _follow(self, batch: Batch) -> None:
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            self._was_lost = True
        if self._was_lost or (batch.number != self.next_number and self._taken.get(batch.number) != batch.ts):
            self._was_lost = False
            self._catch_up(batch.number)
        self._take(batch)

    def _catch_up(self, number: int) -> None:
        """Request the missing batches and the last known one again: if that has changed, the engine is a new one."""
        kept = self.replay(max(0, self.next_number - 1))
        if self.next_number > 0 and (not kept or self._taken.get(kept[0].number) != kept[0].ts):
            self.num_restarts += 1
            self.next_number = 0
            self._taken.clear()
            self.mirror.clear()
            kept = self.replay(0)
        elif number > self.next_number:
            self.gaps.append((self.next_number, number))
        for batch in kept:
            self._take(batch)

    def _take(self, batch: Batch) -> None:
        if self._taken.get(batch.number) == batch.ts or batch.ts < self._began:
            return  # already received from a replay, or from an engine that is gone
        if batch.number == 0:
            self._began = batch.ts
        assert batch.number == self.next_number, "a batch is lost permanently"
        self.mirror.apply(batch.events)
        self._taken[batch.number] = batch.ts
        self.next_number += 1

    def replay(self, start: int) -> list[Batch]:
        """Return all kept batches from number `start` on."""
        self._dealer.send_multipart((b"", start.to_bytes(8, "big")))
        batches: list[Any] = []
        while True:
            assert self._dealer.poll(PATIENCE_S * 1000), "no answer to a replay request"
            empty, topic, number, payload = self._dealer.recv_multipart()
            assert empty == b""
            if number == END:
                assert topic == payload == b""
                return batches
            batches.append(decode(topic, number, payload))
