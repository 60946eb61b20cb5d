"""Following another server's cache by its KV events, with keys that are computed from the blocks' tokens."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quipu.actors.kv_events import follower as follower_module
from quipu.actors.kv_events.event_log import EventBatch, EventLog
from quipu.actors.kv_events.follower import (
    MAX_BATCH_BYTES,
    MAX_EVENT_BYTES,
    MAX_EVENTS,
    NEWS_BLOCKS,
    CacheFollower,
    CacheNews,
    chain_root,
)
from quipu.actors.messages.tiers import LOWER_TIERS, Tier
from quipu.actors.shared.block_keys import chain_keys

SIZE = 4
TOKENS = list(range(100, 112))
KEYS = chain_keys(chain_root(SIZE), TOKENS, SIZE)
LOWER = ("CPU", "DISK", "EXTERNAL")
MEDIA = st.sampled_from(["GPU", *LOWER])
ORDER = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")


def stored(hashes: list[Any], parent: Any, tokens: list[int], **fields: Any) -> dict[str, Any]:
    blocks = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": SIZE}
    return {"type": "BlockStored", **blocks, "lora_id": None, "medium": "GPU", "lora_name": None} | fields


def as_array(event: dict[str, Any]) -> list[Any]:
    """Return an event as vLLM writes it: an array that begins with the tag."""
    return [event["type"], *(value for name, value in event.items() if name != "type")]


class Feed:
    def __init__(self, follower: CacheFollower | None = None) -> None:
        self.follower = follower or CacheFollower()
        self.number = -1

    def __call__(self, *events: Any, skip: int = 0) -> CacheNews:
        """Return the only slice of news from a small batch."""
        (news,) = self.slices(*events, skip=skip)
        return news

    def slices(self, *events: Any, skip: int = 0) -> list[CacheNews]:
        self.number += 1 + skip
        payload = msgspec.msgpack.encode([1.5, list(events), 0])
        return list(self.follower.take(self.number.to_bytes(8, "big"), payload))


@pytest.mark.parametrize("form", [dict, as_array], ids=["maps", "arrays"])
@pytest.mark.parametrize("names", [[b"a" * 32, b"b" * 32, b"c" * 32], [1, 2**63, 3]], ids=["bytes", "numbers"])
def test_keys_are_computed_from_tokens(form: Any, names: list[Any]) -> None:
    """Whatever hashes a publisher uses, its blocks get the keys of their tokens."""
    feed = Feed()
    news = feed(form(stored(names[:2], None, TOKENS[:8])))
    assert news.stored == KEYS[:2] and news.block_size == SIZE
    assert feed(form(stored(names[2:], names[1], TOKENS[8:]))).stored == KEYS[2:]
    removed = {"type": "BlockRemoved", "block_hashes": names[1:2], "medium": "GPU"}
    news = feed(form(removed))
    assert (news.removed, news.stored, news.num_blocks) == (KEYS[1:2], [], 2)
    assert feed(form({"type": "AllBlocksCleared"})).is_cleared


def test_own_publisher_is_understood() -> None:
    """The events of this server's own publisher can be followed."""
    log = EventLog(SIZE)
    log.on_stored([b"x" * 32, b"y" * 32], b"", TOKENS[:8], 0, 0)
    payload = msgspec.msgpack.encode(EventBatch(1.0, log.take(), 0))
    (news,) = CacheFollower().take((0).to_bytes(8, "big"), payload)
    assert news.is_cleared and news.stored == KEYS[:2]


def test_blocks_without_their_parent_are_not_known() -> None:
    """A block has no key if its parent was stored before the subscription began."""
    feed = Feed()
    assert feed(stored([2], 1, TOKENS[4:8])).stored == []
    assert feed(stored([3], 2, TOKENS[8:])).stored == []


@pytest.mark.parametrize(
    "fields", [{"lora_id": 1}, {"lora_name": "l"}, {"medium": "FS"}, {"group_idx": 1}], ids=lambda fields: str(fields)
)
def test_other_kinds_of_blocks_are_ignored(fields: dict[str, Any]) -> None:
    """Blocks of adapters, of tiers below the host and of other groups are ignored: no routed prompt can use them."""
    assert Feed()(stored([1], None, TOKENS[:4], **fields)).stored == []


def test_after_a_gap_nothing_is_known() -> None:
    """After a gap in the numbers everything is forgotten, because the missed batches may have removed blocks."""
    feed = Feed()
    feed(stored([1], None, TOKENS[:4]))
    news = feed(stored([2], 1, TOKENS[4:8]), skip=1)
    assert news.is_cleared and news.stored == [] and news.num_blocks == 0


def test_a_block_that_comes_and_goes_in_one_batch() -> None:
    """A block that a batch stores and then removes is not reported as stored."""
    news = Feed()(stored([1, 2], None, TOKENS[:8]), {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"})
    assert news.stored == KEYS[:1]


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def test_block_on_the_host_is_still_held() -> None:
    """A block that leaves the device is not reported as removed while it is on the host, and vice versa."""
    feed = Feed()
    feed(stored([1, 2], None, TOKENS[:8]))
    assert feed(stored([1, 2], None, [], medium="CPU")).removed == []
    assert feed(removed(1)).removed == [], "vLLM reports copies by their hashes alone"
    assert feed(removed(1) | {"medium": "CPU"}).removed == KEYS[:1]
    assert feed(removed(2) | {"medium": "CPU"}).removed == []
    assert feed(removed(2)).removed == KEYS[1:2]
    assert feed().num_blocks == 0


def test_block_that_reaches_the_host_late() -> None:
    """A copy reported after the block has left the device gets a key if it has tokens, and so do blocks after it."""
    feed = Feed()
    feed(stored([1], None, TOKENS[:4]))
    assert feed(removed(1)).removed == KEYS[:1]
    assert feed(stored([1], None, TOKENS[:4], medium="CPU")).stored == KEYS[:1]
    assert feed(stored([2], 1, TOKENS[4:8])).stored == KEYS[1:2]
    assert feed(stored([7], None, [], medium="CPU")).stored == [], "the block is unknown"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("CPU", {"medium": "CPU"}),
        ("CPU", {"medium": "CPU_PINNED"}),
        ("DISK", {"medium": "NVME"}),
        ("DISK", {"medium": "STORAGE", "locality": "LOCAL"}),
        ("EXTERNAL", {"medium": "STORAGE", "locality": "REMOTE"}),
        ("EXTERNAL", {"medium": "SHARED"}),
    ],
    ids=str,
)
def test_names_of_tiers(name: str, fields: dict[str, Any]) -> None:
    """A tier is the same by whichever of its names an engine calls it, and no other tier than that."""
    feed = Feed()
    feed(stored([1], None, TOKENS[:4]))
    feed(stored([1], None, [], **fields), removed(1))
    for other in LOWER:
        if other != name:
            assert feed(removed(1) | {"medium": other}).removed == []
    assert feed(removed(1) | {"medium": name}).removed == KEYS[:1]


def test_block_that_goes_down_tier_by_tier() -> None:
    """A block is reported as removed once it has left the last tier; a copy's key is known from any other tier."""
    feed = Feed()
    feed(stored([1], None, TOKENS[:4]))
    above = "GPU"
    for medium in LOWER:
        news = feed(stored([1], None, [], medium=medium), removed(1) | {"medium": above})
        assert (news.stored, news.removed, news.num_blocks) == ([], [], 1)
        above = medium
    assert feed(removed(1) | {"medium": above}).removed == KEYS[:1]


@pytest.mark.parametrize("tier", LOWER_TIERS)
def test_own_lower_tiers_are_understood(tier: Tier) -> None:
    """This server's own events about its lower tiers can be followed, in whatever order a block moves."""
    log, follower = EventLog(SIZE, has_lower_tiers=True), CacheFollower()

    def news(number: int) -> CacheNews:
        payload = msgspec.msgpack.encode(EventBatch(1.0, log.take(), 0))
        (changed,) = follower.take(number.to_bytes(8, "big"), payload)
        return changed

    names = [b"x" * 32, b"y" * 32]
    log.on_stored(names, b"", TOKENS[:8], 0, 0)
    assert news(0).stored == KEYS[:2]
    log.on_removed(names[::-1])
    assert news(1).removed == KEYS[:2][::-1]
    log.on_stored(names[:1], b"", [], 0, 0, tier=tier)
    log.on_stored(names[1:], b"", [], 0, 0, tier=tier)
    assert news(2).stored == KEYS[:2]
    log.on_stored(names, b"", TOKENS[:8], 0, 0)
    log.on_removed(names)
    assert news(3).removed == []
    log.on_removed(names, tier)
    assert news(4).removed == KEYS[:2]


def test_large_batches_are_told_in_slices() -> None:
    """However many blocks a batch stores and removes, each slice of news has a bounded number of them, in order."""
    feed, count = Feed(), 3 * NEWS_BLOCKS + 5
    tokens = list(range(count * SIZE))
    slices = feed.slices(stored(list(range(count)), None, tokens))
    assert [key for news in slices for key in news.stored] == chain_keys(chain_root(SIZE), tokens, SIZE)
    assert max(len(news.stored) for news in slices) < 2 * NEWS_BLOCKS and len(slices) >= 3
    slices = feed.slices(*(removed(number) for number in range(count)))
    assert max(len(news.removed) for news in slices) <= NEWS_BLOCKS
    assert sum(len(news.removed) for news in slices) == count and slices[-1].num_blocks == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.builds(
                lambda at, count, medium: ("store", at, count, medium), st.integers(0, 7), st.integers(1, 8), MEDIA
            ),
            st.builds(
                lambda at, count, medium: ("copy", at, count, medium),
                st.integers(0, 7),
                st.integers(1, 8),
                st.sampled_from(LOWER),
            ),
            st.builds(lambda at, medium: ("remove", at, 1, medium), st.integers(0, 15), MEDIA),
            st.just(("clear", 0, 0, "")),
        ),
        max_size=20,
    )
)
def test_slices_say_what_is_known(changes: list[tuple[str, int, int, str]]) -> None:
    """Whatever a batch does in any tier, applying its slices in order yields the blocks that any tier has
    afterwards."""
    all_keys = chain_keys(chain_root(SIZE), list(range(16 * SIZE)), SIZE)
    events: list[Any] = []
    held: dict[str, set[int]] = {medium: set() for medium in ("GPU", *LOWER)}
    for what, at, count, medium in changes:
        numbers = range(at, at + count)
        if what == "store":
            tokens = list(range(SIZE * at, SIZE * (at + count)))
            events.append(stored(list(numbers), at - 1 if at else None, tokens, medium=medium))
            held[medium] |= set(numbers) if not at or at - 1 in set().union(*held.values()) else set()
        elif what == "copy":
            events.append(stored(list(numbers), None, [], medium=medium))
            held[medium] |= set().union(*held.values()).intersection(numbers)
        elif what == "remove":
            events.append(removed(at) | {"medium": medium})
            held[medium].discard(at)
        else:
            events.append({"type": "AllBlocksCleared"})
            held = {medium: set() for medium in held}
    feed, known = Feed(), set[bytes]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower_module, "NEWS_BLOCKS", 2)
        for news in feed.slices(*events):
            known = set() if news.is_cleared else known
            known -= set(news.removed)
            known |= set(news.stored)
    assert known == {all_keys[number] for number in set().union(*held.values())}
    assert news.num_blocks == sum(map(len, held.values()))


def test_one_event_is_bounded() -> None:
    """An event that is too large to decode in one piece is refused, and so are too many events; then everything is
    forgotten."""
    feed = Feed()
    feed(stored([1], None, TOKENS[:4]))
    count = MAX_EVENT_BYTES // SIZE
    with pytest.raises(ValueError, match="an event of more than"):
        feed.slices(stored(list(range(count)), None, [7] * (SIZE * count)))
    assert feed().is_cleared and feed().num_blocks == 0
    with pytest.raises(ValueError, match="no batch"):
        feed.slices(*[{"type": "AllBlocksCleared"}] * (MAX_EVENTS + 1))


def test_one_batch_is_bounded() -> None:
    """A batch that is too large to be split into events in one piece is refused; then everything is forgotten."""
    feed = Feed()
    feed(stored([1], None, TOKENS[:4]))
    count = MAX_EVENT_BYTES // SIZE // 10
    events = [stored([number], None, [70_000] * SIZE * count, medium="FS") for number in range(10)]
    assert feed(*events).num_blocks == 1, "a much smaller batch must be read"
    with pytest.raises(ValueError, match="a batch of"):
        feed.slices(*events * (MAX_BATCH_BYTES // (5 * SIZE * count) // 10 + 1))
    assert feed().is_cleared and feed().num_blocks == 0


@pytest.mark.parametrize("make_name", [int, lambda number: number << 20, lambda number: number.to_bytes(32, "big")])
def test_no_dict_grows_with_all_blocks(make_name: Any) -> None:
    """However many blocks are known, each dict has only a few of them, because a dict is copied at once when it
    grows."""
    feed, count, each = Feed(), 40_000, 4_000
    for first in range(0, count, each):
        names = [make_name(number) for number in range(first, first + each)]
        parent = make_name(first - 1) if first else None
        news = feed.slices(stored(names, parent, [7] * (SIZE * each)))
    assert news[-1].num_blocks == count
    waiting: list[Any] = [feed.follower]
    sizes: list[int] = []
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            sizes.append(len(found))
        elif not isinstance(found, type):
            waiting += gc.get_referents(found)
    assert 0 < max(sizes) <= count // 60


def test_blocks_are_bounded() -> None:
    """If there are more blocks than the maximum, all are forgotten."""
    feed = Feed(CacheFollower(max_blocks=2))
    feed(stored([1, 2], None, TOKENS[:8]))
    news = feed(stored([3], 2, TOKENS[8:]))
    assert news.is_cleared and news.num_blocks == 0


@pytest.mark.parametrize(
    "event",
    [
        stored([1], None, TOKENS[:3]),
        stored([1], None, [-1] * 4),
        stored([1], None, [2**40] * 4),
        stored([1], None, TOKENS[:4], block_size=0),
        {"type": "BlockStored"},
        {"type": "Unheard"},
        7,
    ],
    ids=["too few tokens", "negative", "large", "no size", "no fields", "unknown", "number"],
)
def test_garbage_is_refused(event: Any) -> None:
    """A batch that cannot be read raises ValueError."""
    with pytest.raises(ValueError, match="no batch"):
        Feed().slices(event)


@pytest.mark.parametrize(("sequence", "payload"), [(b"", b"\x90"), (bytes(8), b"\xc1"), (bytes(8), b"\x91" * 5000)])
def test_invalid_frames(sequence: bytes, payload: bytes) -> None:
    """A number or a payload that is not one raises ValueError."""
    with pytest.raises(ValueError, match="no "):
        list(CacheFollower().take(sequence, payload))
