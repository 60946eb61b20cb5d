"""The cache watch: the figures of a window, by tenant and in total, within bounds on memory."""

from __future__ import annotations

import hashlib
from typing import Any

import attrs
import pytest

from quipu.actors.cache_insight import cache_watch
from quipu.actors.cache_insight.cache_figures import CacheFigures
from quipu.actors.cache_insight.cache_watch import MAX_FOLLOWED, MAX_ROWS, NO_HITS_AFTER, CacheWatch, WatchedPrompt
from quipu.actors.cache_insight.reuse_sketch import ReuseSketch, make_sketch
from quipu.actors.cache_insight.reuse_window import NUM_SLICES, WINDOWS
from tests.step_reports import report

WINDOW_S = 1200.0
SLICE_S = WINDOW_S / NUM_SLICES
BLOCK = 16


@attrs.define
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def keys(*numbers: int, of: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{of} {number}".encode()).digest() for number in numbers]


def cut(*numbers: int, of: str = "") -> bytes:
    return b"".join(key[:8] for key in keys(*numbers, of=of))


def prompt(tenant: str, *numbers: int, found: int = 0, **fields: Any) -> WatchedPrompt:
    """Return a prompt of these blocks and one token more, so that each block could be found."""
    of = fields.pop("of", tenant)
    return WatchedPrompt(
        tenant, fields.pop("model", "m"), len(numbers) * BLOCK + 1, found * BLOCK, keys(*numbers, of=of), **fields
    )


def watch_of(clock: Clock) -> CacheWatch:
    return CacheWatch(WINDOW_S, BLOCK, clock=clock, unix_time=lambda: 1_000_000.0 + clock.now)


def only(watch: CacheWatch, tenant: str | None = None) -> CacheFigures:
    (figures,) = watch.figures(tenant)
    return figures


def test_hit_rate_over_time() -> None:
    """Each slice with requests has its own numbers, at its own time; slices older than the window are gone."""
    clock = Clock()
    watch = watch_of(clock)
    watch.on_prompt(prompt("a", 1, 2, 3), 10.0)
    watch.on_prompt(prompt("a", 1, 2, 3, 4, found=3, is_first_hit=True), SLICE_S + 5)
    watch.on_prompt(prompt("a", 1, found=1, is_first=False), SLICE_S + 5)
    clock.now = SLICE_S + 20
    figures = only(watch)
    assert (figures.num_requests, figures.num_hits) == (2, 1)
    assert (figures.prompt_tokens, figures.cached_tokens) == (49 + 65 + 17, 64)
    assert [one.start_s - 1_000_000 for one in figures.series] == pytest.approx([0.0, SLICE_S])
    assert [one.end_s - 1_000_000 for one in figures.series] == pytest.approx([SLICE_S, SLICE_S + 20])
    assert [(one.num_requests, one.cached_tokens) for one in figures.series] == [(1, 0), (1, 64)]
    clock.now = WINDOW_S + 1
    assert [one.cached_tokens for one in only(watch).series] == [64]
    clock.now = WINDOW_S + SLICE_S + 1
    late = only(watch)
    assert late.prompt_tokens == 0 and late.series == () and late.hit_rate is None
    assert late.reuse is not None and late.reuse.query_blocks == 0


def test_what_larger_caches_would_have_found() -> None:
    """An infinite cache finds each block that was used before; the sizes are those of an LRU cache."""
    clock = Clock()
    watch = watch_of(clock)
    for at, numbers in enumerate([(1, 2), (3, 4), (1, 2), (1, 2)]):
        watch.on_prompt(prompt("a", *numbers), float(at))
    reuse = only(watch).reuse
    assert reuse is not None and watch.overall().reuse == reuse
    assert (reuse.query_blocks, reuse.hit_blocks, reuse.sampled_share) == (8, 4, 1.0)
    assert reuse.hit_rate == pytest.approx(4 * BLOCK / (4 * 33))
    assert reuse.blocks == {0.5: 2, 0.9: 4, 0.99: 4}


def test_what_no_cache_could_have_found() -> None:
    """Possible hits exclude the block with a prompt's last token, prompts that may not read, and those of upstreams."""
    clock = Clock()
    watch = watch_of(clock)
    for _ in range(2):
        watch.on_prompt(attrs.evolve(prompt("a", 1, 2), num_tokens=2 * BLOCK), 0.0)
        watch.on_prompt(prompt("a", 1, reads_cache=False), 0.0)
        watch.on_prompt(WatchedPrompt("a", "m", 1000, 0), 0.0)
    reuse = only(watch).reuse
    assert reuse is not None and (reuse.query_blocks, reuse.hit_blocks) == (2, 1)


def test_bound_is_never_below_what_was_found() -> None:
    """Hits on blocks that an engine cached before this process started count as possible."""
    clock = Clock()
    watch = watch_of(clock)
    watch.on_prompt(prompt("a", 1, 2, 3, found=3), 0.0)
    figures = only(watch)
    assert figures.reuse is not None and figures.reuse.hit_rate == figures.hit_rate
    assert figures.cached_tokens > 0


def test_filled_blocks_count_as_used() -> None:
    """Blocks that decoding filled count as possible hits of the next turn."""
    clock = Clock()
    watch = watch_of(clock)
    watch.on_prompt(prompt("a", 1), 0.0)
    watch.on_report(report(filled_ids=[7, 8], filled_keys=b"".join(keys(2, 3, of="a"))), {7: ("a", "m")}, 1.0)
    watch.on_prompt(prompt("a", 1, 2, 3), 2.0)
    reuse = only(watch).reuse
    assert reuse is not None and (reuse.query_blocks, reuse.hit_blocks) == (4, 2), "sequence 8 belongs to no tenant"


def test_tenants_do_not_see_each_other() -> None:
    """A tenant's figures do not depend on other tenants; the overall figures are sums over all."""
    clock = Clock()
    alone, beside = watch_of(clock), watch_of(clock)
    for at in range(3000):
        now, numbers = at / 10, [at % 50, 50 + at % 70, at]
        beside.on_prompt(prompt("a", *range(3 * at % 7000, 3 * at % 7000 + 9), found=at % 2), now)
        for watch in (alone, beside):
            watch.on_prompt(prompt("b", *numbers, found=at % 3), now)
    clock.now = 300.0
    assert only(alone, "b") == only(beside, "b")
    assert [(figures.tenant, figures.model) for figures in beside.figures()] == [("b", "m"), ("a", "m")]
    overall, rows = beside.overall(), list(beside.figures())
    assert overall.prompt_tokens == sum(row.prompt_tokens for row in rows)
    both = [row.reuse for row in rows if row.reuse is not None]
    assert overall.reuse is not None
    assert overall.reuse.query_blocks == sum(reuse.query_blocks for reuse in both)
    assert overall.reuse.hit_blocks == pytest.approx(sum(reuse.hit_blocks for reuse in both), rel=0.02)
    largest = [reuse.blocks[0.99] or 0 for reuse in both]
    assert max(largest) < (overall.reuse.blocks[0.99] or 0), "they share one cache"


def test_models_have_rows_of_their_own() -> None:
    """The same blocks under another model name are counted in a row of their own."""
    watch = watch_of(Clock())
    for model in ("m", "n"):
        watch.on_prompt(prompt("a", 1, model=model), 0.0)
    assert [figures.model for figures in watch.figures()] == ["n", "m"]
    assert [figures.model for figures in watch.figures("a", "m")] == ["m"]
    assert list(watch.figures("a", "o")) == list(watch.figures("b")) == []


def test_age_at_eviction() -> None:
    """The time that evicted blocks had been idle is in the figures of their tenant and in the overall figures."""
    clock = Clock()
    watch = watch_of(clock)
    watch.on_prompt(prompt("a", 1, 2), 0.0)
    watch.on_prompt(prompt("b", 1), 4.0)
    assert only(watch, "a").evictions is None
    watch.on_report(report(removed_keys=cut(2, of="a") + cut(1, of="b") + cut(9)), {}, 10.0)
    clock.now = 10.0
    a, b, overall = only(watch, "a").evictions, only(watch, "b").evictions, watch.overall().evictions
    assert a is not None and (a.num_sampled, a.idle_s[0.5]) == (1, 10.0)
    assert b is not None and (b.num_sampled, b.idle_s[0.5]) == (1, 6.0)
    assert overall is not None and (overall.num_sampled, overall.idle_s[0.5], overall.idle_s[0.99]) == (2, 6.0, 10.0)


def test_pins() -> None:
    """Pinned prefixes count for their tenant; blocks that only pins keep are summed over the running engines."""
    watch = watch_of(Clock())
    for engine_id, blocks in ((0, 3), (1, 4)):
        pinned = report(
            pinned_ids=[5, 6], pinned_ends=[32, 64], num_pinned_blocks=blocks, num_pins_yielded=1, engine_id=engine_id
        )
        watch.num_pinned[engine_id] = pinned.num_pinned_blocks
        watch.on_report(pinned, {5: ("a", "m")}, 0.0)
    assert (only(watch).pins.num_prompts, only(watch).pins.num_tokens) == (2, 64)
    assert (watch.pinned().num_blocks, watch.pinned().num_yielded) == (7, 2)
    watch.on_engine_gone(1)
    assert watch.pinned().num_blocks == 3


def test_bounds() -> None:
    """Rows and sketches are bounded; a row without requests in the window loses its sketch to another."""
    clock = Clock()
    watch = watch_of(clock)
    for tenant in range(MAX_ROWS + 5):
        watch.on_prompt(prompt(f"t{tenant}", 1, 2), 0.0)
    rows = list(watch.figures())
    assert len(rows) == MAX_ROWS and rows[0].tenant == f"t{MAX_ROWS + 4}"
    assert only(watch, f"t{MAX_ROWS // 2}").reuse is None, "the sketches are taken by others"
    assert watch.num_bytes < 64 << 20
    clock.now = WINDOW_S + 1
    watch.on_prompt(prompt("late", 1, 2), clock.now)
    assert only(watch, "late").reuse is not None
    followed = [row.tenant for row in watch.figures() if row.reuse is not None]
    assert len(followed) <= MAX_FOLLOWED


def test_sketches_are_renewed() -> None:
    """After some windows a fresh sketch takes over that has seen the last window, so that no recent block counts as
    new."""
    clock = Clock()
    watch = watch_of(clock)
    end_s = (WINDOWS + 0.5) * WINDOW_S
    watch.on_prompt(prompt("a", 1000, 1001), 0.0)
    for number in range(int(end_s / 10)):
        clock.now = number * 10.0
        watch.on_prompt(prompt("a", number % 30), clock.now)
    reuse = only(watch).reuse
    assert reuse is not None and reuse.hit_blocks == reuse.query_blocks >= WINDOW_S / 10 * 0.9
    before = reuse.hit_blocks
    watch.on_prompt(prompt("a", 1000, 1001), clock.now)
    reuse = only(watch).reuse
    assert reuse is not None and reuse.hit_blocks == before, "blocks used long ago must be forgotten"


def test_no_hits_are_noted_once() -> None:
    """Many requests without any hit are reported once; after a single hit they never are."""
    watch = watch_of(Clock())
    for _ in range(NO_HITS_AFTER - 1):
        watch.on_prompt(prompt("a", 1), 0.0)
        assert watch.take_no_hits() is None
    watch.on_prompt(prompt("a", 1), 0.0)
    figures = watch.take_no_hits()
    assert figures is not None and figures.reuse is not None and figures.reuse.hit_rate > 0
    for _ in range(NO_HITS_AFTER):
        watch.on_prompt(prompt("a", 1), 0.0)
        assert watch.take_no_hits() is None
    lucky = watch_of(Clock())
    lucky.on_prompt(prompt("a", 1, found=1), 0.0)
    for _ in range(NO_HITS_AFTER + 1):
        lucky.on_prompt(prompt("a", 1), 0.0)
    assert lucky.take_no_hits() is None


def test_same_counts_without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures do not depend on whether the sketch is the one in C or the one in Python."""
    found: list[CacheFigures] = []
    for make in (make_sketch, ReuseSketch):
        monkeypatch.setattr(cache_watch, "make_sketch", make)
        watch = watch_of(Clock())
        for at in range(200):
            watch.on_prompt(prompt("a", *range(at, at + 90), found=at % 4), 0.0)
        found.append(only(watch))
    assert found[0] == found[1]
