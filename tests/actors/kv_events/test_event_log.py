"""KV events without sockets: applying them yields the committed contents of the cache, whatever happens."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import settings

from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.kv_events import block_contents
from quipu.actors.kv_events.block_contents import BlockContents
from quipu.actors.kv_events.event_log import BatchQueue, Event, EventBatch, EventLog
from quipu.actors.messages.block_manager import Reserve
from quipu.actors.messages.scheduler import Granted
from quipu.actors.messages.tiers import Tier
from quipu.kernels.fake import Dials
from tests.actors.engine.block_manager.proposals import Candidate, keys_of, reserve, root_of
from tests.actors.engine.engine_bench import EngineBench
from tests.actors.engine.scheduler.test_planning_property import EngineMachine
from tests.kv_mirror import Mirror

SIZE = 2


def on_the_wire(events: list[Event]) -> list[dict[str, Any]]:
    ts, decoded, rank = msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.5, events, 0)))
    assert (ts, rank) == (1.5, 0)
    result: list[dict[str, Any]] = decoded
    return result


class MirroredManager(BlockManager):
    """A block manager whose events are applied to a mirror and compared with its pool after every grant."""

    def __init__(self, *args: Any, roots: tuple[bytes, ...], **kwargs: Any) -> None:
        self.events = EventLog(args[1])
        super().__init__(*args, observers=[self.events], **kwargs)
        self.mirror = Mirror(args[1])
        self.roots = roots
        self.hashes_tokens_alone = True
        """Whether no key covers an image, too."""
        self.last: list[dict[str, Any]] = []

    def grant(self, proposal: Reserve, now: float = 0.0) -> Granted:
        granted = super().grant(proposal, now)
        self.last = on_the_wire(self.events.take())
        self.mirror.apply(self.last)
        if self.hashes_tokens_alone:
            self.mirror.check(self.roots)
        assert set(self.mirror.blocks) == self.pool.state().committed_keys(), "the events and the index differ"
        return granted


class MirroredBench(EngineBench):
    def __init__(
        self,
        limits: SchedulerConfig,
        *,
        watermark: int = 0,
        sharing: bool = False,
        step_overhead_tokens: int = 0,
        max_pinned_share: float = 0.5,
        dials: Dials | None = None,
    ) -> None:
        super().__init__(limits, watermark=watermark, sharing=sharing, dials=dials)
        self.manager: MirroredManager = MirroredManager(
            limits.num_blocks,
            limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
            share_pending_prefixes=sharing,
            step_overhead_tokens=step_overhead_tokens,
            watermark_blocks=watermark,
            max_pinned_share=max_pinned_share,
            roots=tuple(root_of(domain, limits.block_size) for domain in "ab"),
        )
        self.manager.hashes_tokens_alone = not limits.whole_image_tokens


class MirroredMachine(EngineMachine):
    """Everything that can happen to an engine, including resets and failures, with a subscriber."""

    bench_type = MirroredBench


TestMirror = MirroredMachine.TestCase
TestMirror.settings = settings(max_examples=max(80, settings.default.max_examples))


# ---------------------------------------------------------------- single grants


@attrs.define
class Cache:
    """A block manager driven by hand."""

    manager: MirroredManager
    step: int = 0

    def grant(self, **proposal: Any) -> list[dict[str, Any]]:
        """Return the events of one grant."""
        self.step += 1
        self.manager.grant(reserve(self.step, SIZE, **proposal))
        return self.manager.last

    def compute(self, sequence_id: int, tokens: list[int]) -> list[dict[str, Any]]:
        """Compute a prompt in one step and end it. Returns the events of its end."""
        self.grant(candidates=[Candidate(sequence_id, tokens, len(tokens))])
        return self.grant(committed=[self.step], free=[sequence_id])


def cache_of(num_blocks: int = 12) -> Cache:
    return Cache(MirroredManager(num_blocks, SIZE, roots=(root_of("a", SIZE), root_of("b", SIZE))))


def test_first_batch_clears() -> None:
    """The first batch clears the subscriber's view of the cache; a grant that changes nothing adds no event."""
    cache = cache_of()
    assert cache.grant() == [{"type": "AllBlocksCleared"}]
    assert cache.grant() == []


def test_one_event_for_a_chain() -> None:
    """Blocks of one chain are one event, without a parent if the chain begins there; only committed blocks are
    reported."""
    cache = cache_of()
    tokens = [1, 2, 3, 4, 5]
    keys = keys_of("a", tokens, SIZE)
    assert cache.grant(candidates=[Candidate(1, tokens, 5)]) == [{"type": "AllBlocksCleared"}], (
        "pending blocks must not be reported"
    )
    assert cache.grant(committed=[1]) == [
        {
            "type": "BlockStored",
            "block_hashes": keys,
            "parent_block_hash": None,
            "token_ids": tokens[:4],
            "block_size": SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
        }
    ]
    (stored,) = cache.compute(2, [*tokens[:4], 7, 8, 9])
    assert stored["parent_block_hash"] == keys[-1]
    assert stored["token_ids"] == [7, 8]


def test_chains_stay_apart() -> None:
    """Each prompt of a step has its own event, even if the root of one could be mistaken for a parent."""
    cache = cache_of()
    cache.grant(candidates=[Candidate(1, [1, 2, 3], 3, "a"), Candidate(2, [1, 2, 3], 3, "b")])
    assert [event["parent_block_hash"] for event in cache.grant(committed=[1])] == [None, None]


def test_removed() -> None:
    """All evictions of one grant are one event, tail first, in the order of reuse."""
    cache = cache_of(num_blocks=6)
    keys = keys_of("a", [1, 2, 3, 4, 5, 6], SIZE)
    cache.compute(1, [1, 2, 3, 4, 5, 6])
    (removed,) = cache.grant(candidates=[Candidate(2, [9] * 9, 9)])
    assert removed == {"type": "BlockRemoved", "block_hashes": keys[::-1], "medium": "GPU", "group_idx": 0}


def test_failed_step() -> None:
    """A block whose step failed was never stored, so it is neither reported as stored nor as removed."""
    cache = cache_of()
    cache.grant(candidates=[Candidate(1, [1, 2, 3], 3)])
    assert cache.grant(failed=[1], free=[1]) == []
    assert cache.grant(candidates=[Candidate(2, [9] * 9, 9)]) == []


def test_reset() -> None:
    """A reset is one event; steps in flight report nothing that they wrote for the old cache."""
    cache = cache_of()
    cache.compute(1, [1, 2, 3])
    cache.grant(candidates=[Candidate(2, [4, 5, 6], 3)])
    assert cache.grant(reset=True, committed=[cache.step]) == [{"type": "AllBlocksCleared"}]
    assert cache.grant(free=[2]) == []


def test_orphan_keeps_its_parent() -> None:
    """A block names its parent even if that was never reported; null is for the first block of a chain only."""
    log = EventLog(SIZE)
    log.take()
    log.on_stored(b"child", b"unreported", [3, 4], 0, 1)
    (stored,) = on_the_wire(log.take())
    assert stored["parent_block_hash"] == b"unreported"


def test_merging_copies_token_ids() -> None:
    """Token ids are copied, because callers keep the lists that they pass."""
    log = EventLog(SIZE)
    first, second = [1, 2], [3, 4]
    log.on_stored(b"k1", b"root", first, 0, 0)
    log.on_stored(b"k2", b"k1", second, 0, 1)
    assert (first, second) == ([1, 2], [3, 4])


# ---------------------------------------------------------------- lower tiers


@pytest.mark.parametrize(("tier", "medium"), [(Tier.HOST, "CPU"), (Tier.DISK, "DISK"), (Tier.REMOTE, "EXTERNAL")])
def test_copies_are_reported_in_full(tier: Tier, medium: str) -> None:
    """A block that is stored in a lower tier is reported with parent and tokens, though it has left the device."""
    log = EventLog(SIZE, has_lower_tiers=True)
    log.take()
    log.on_stored([b"k1", b"k2"], b"root", [1, 2, 3, 4], 0, 0)
    (stored,) = on_the_wire(log.take())
    log.on_removed([b"k2", b"k1"])
    log.on_stored([b"k1", b"k2"], b"", [], 0, 0, tier=tier)
    removed, copied = on_the_wire(log.take())
    assert (removed["block_hashes"], removed["medium"]) == ([b"k2", b"k1"], "GPU")
    assert copied == {**stored, "medium": medium}
    log.on_removed([b"k1"], tier)
    assert on_the_wire(log.take()) == [
        {"type": "BlockRemoved", "block_hashes": [b"k1"], "medium": medium, "group_idx": 0}
    ]


def test_contents_of_blocks_on_a_disk_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks are on a disk, contents are kept of those in memory and of a fixed number of others."""
    monkeypatch.setattr(block_contents, "MAX_MOVING", 2)
    log = EventLog(SIZE, has_lower_tiers=True)
    keys = [b"k%d" % index for index in range(6)]
    log.on_stored(keys, b"root", list(range(12)), 0, 0)
    log.on_stored(keys, b"", [], 0, 0, tier=Tier.DISK)
    log.on_stored(keys[:1], b"", [], 0, 0, tier=Tier.HOST)
    log.on_removed(keys[::-1])
    log.take()
    log.on_stored(keys, b"", [], 0, 0, tier=Tier.REMOTE)
    told = {key: event["token_ids"] for event in on_the_wire(log.take()) for key in event["block_hashes"]}
    assert [bool(told[key]) for key in keys] == [True, True, True, False, False, False]


def test_events_of_two_tiers_are_not_merged() -> None:
    """Events of two tiers are never merged, even if one continues where the other ends."""
    log = EventLog(SIZE, has_lower_tiers=True)
    log.take()
    log.on_stored([b"k1"], b"root", [1, 2], 0, 0)
    log.on_stored([b"k1"], b"", [], 0, 0, tier=Tier.HOST)
    log.on_stored([b"k2"], b"k1", [3, 4], 0, 1)
    log.on_removed([b"k1"])
    log.on_removed([b"k1"], Tier.HOST)
    assert [event["medium"] for event in on_the_wire(log.take())] == ["GPU", "CPU", "GPU", "GPU", "CPU"]


def test_unknown_copies() -> None:
    """A copy whose contents are no longer known is reported by its keys alone, as vLLM reports all its copies."""
    log = EventLog(SIZE, has_lower_tiers=True)
    log.take()
    log.on_stored([b"k1", b"k2"], b"", [], 0, 0, tier=Tier.HOST)
    (stored,) = on_the_wire(log.take())
    assert (stored["block_hashes"], stored["token_ids"], stored["parent_block_hash"]) == ([b"k1", b"k2"], [], None)


def test_contents_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents are kept of blocks in any tier, and of a fixed number of those that have left the last one."""
    monkeypatch.setattr(block_contents, "MAX_MOVING", 3)
    contents = BlockContents(SIZE)
    keys = [bytes([index]) for index in range(10)]
    contents.add(keys, None, list(range(20)))
    contents.hold(keys[:2])
    contents.drop(keys)
    assert len(contents) == 2 + 3 and contents.find(keys[-1]) and not contents.find(keys[2])
    contents.hold(keys[-1:])
    contents.drop(keys[:2])
    assert {key for key in keys if contents.find(key)} == {keys[0], keys[1], keys[8], keys[9]}
    contents.drop(keys[:2])
    contents.clear()
    assert len(contents) == 0


# ---------------------------------------------------------------- numbers


def test_queue_drops_the_oldest() -> None:
    """Beyond the queue's size the oldest batches are not sent; they are kept with their numbers."""
    queue = BatchQueue(buffer_steps=4, max_queue_size=2)
    for number in range(5):
        queue.append(bytes([number]))
    assert queue.num_dropped == 3
    assert [(b.sequence, b.payload) for b in queue.take_unsent()] == [(3, b"\3"), (4, b"\4")]
    assert queue.take_unsent() == []
    assert [b.sequence for b in queue.kept_from(0)] == [1, 2, 3, 4]
    assert [b.sequence for b in queue.kept_from(3)] == [3, 4]
    assert queue.kept_from(5) == []
    assert queue.kept_from(4)[0].sequence_bytes == b"\0\0\0\0\0\0\0\4"
