"""How the prefix cache is used within a window of time, by tenant and model name, on all engines together.

Part of the entry store, so that it outlives the accountant, which feeds it with each prompt whose numbers are frozen
(`effects.py`) and with each step report; read by the web layer and by the metrics. The blocks of each tenant and model
are followed in a sketch of their own, so that what one tenant is told does not depend on the others, and those of all
in a shared one. While there is a single tenant and model, the two are the same.

What must always hold: memory is bounded by `MAX_ROWS` and `MAX_FOLLOWED`, and the time of a call by its keys; nothing
here runs in an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter

import attrs

from ..messages.accountant import StepReport
from ..messages.explanations import ExplainedPrompt
from ..shared.block_keys import KEY_BYTES, KEY_PREFIX_BYTES
from ..shared.native import IS_COMPILED
from .cache_figures import CacheFigures, HeldBlocks, PinnedNow, TreeNode
from .cache_rows import CacheRow
from .prefix_tree import NOBODY, Passage, PrefixTree
from .request_paths import RequestPaths
from .reuse_sketch import make_sketch
from .reuse_window import ReuseWindow
from .tree_view import TreeView

MAX_ROWS = 1024
"""Tenants and models; beyond it, the least recently used are forgotten."""
MAX_FOLLOWED = 32 if IS_COMPILED else 8
"""Tenants and models whose blocks are followed, each in about 0.7 MB (2.5 MB in Python), for some time in two."""
SAMPLED_KEYS = 8192
REGISTER_BITS = 16
NO_HITS_AFTER = 500
"""Requests without a hit after which the log says so."""


@attrs.frozen
class WatchedPrompt:
    """A prompt whose numbers are frozen."""

    tenant: str
    model: str
    num_tokens: int
    num_cached: int
    keys: list[bytes] | None = None
    """Of its blocks. None: they are not known here, since an upstream has computed it."""
    reads_cache: bool = True
    is_first: bool = True
    """Of its request."""
    is_first_hit: bool = False
    """The first of its request with cached tokens."""
    sequence_ids: tuple[int, ...] = ()
    """That hold its blocks."""
    pin_ttl_s: int = 0
    """For how long what it marks is pinned after each use."""
    passage: Passage = NOBODY


class CacheWatch:
    """Follows the use of the cache. Every method returns soon."""

    def __init__(
        self,
        window_s: float = 3600.0,
        block_size: int = 16,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
        tree: PrefixTree | None = None,
        max_paths: int = 10_000,
    ) -> None:
        """Remember the paths of `max_paths` requests through `tree` (None: one of its own). `clock` gives all times."""
        self.window_s = window_s
        self.block_size = block_size
        self._clock = clock
        self._unix_time = unix_time
        self._all = CacheRow(None, None, 0, window_s)
        self._rows: dict[tuple[str, str], CacheRow] = {}
        """By tenant and model, the last used ones last."""
        self._by_number: dict[int, CacheRow] = {}
        self._followed: list[CacheRow] = []
        """Rows with a sketch of their own."""
        self._num_rows_made = 0
        self.num_pinned: dict[int, int] = {}
        """Blocks that only pins keep, by engine."""
        self.held_by: Callable[[Sequence[bytes]], Mapping[int, HeldBlocks]] = lambda keys: {}
        """Returns how many of the first of these blocks each engine has."""
        self.explained: Callable[[str, int], ExplainedPrompt | None] = lambda request_id, prompt_index: None
        """Returns what is known of a request's prompt."""
        self._tree = PrefixTree() if tree is None else tree
        self._paths = RequestPaths(max_paths)
        self._pin_ttls: dict[int, int] = {}
        """Of open sequences that mark prefixes."""
        self._num_without_hit: int | None = 0
        """Requests so far; None after the first hit, and once the warning was logged."""

    def on_prompt(self, prompt: WatchedPrompt, now: float) -> None:
        """Count a prompt. Called in the order of the admissions, once for each."""
        row = self._row(prompt.tenant, prompt.model)
        num_tokens, num_cached = prompt.num_tokens, prompt.num_cached
        for one in (row, self._all):
            one.count(num_tokens, num_cached, now, is_first=prompt.is_first, is_first_hit=prompt.is_first_hit)
        if self._num_without_hit is not None:
            self._num_without_hit = None if num_cached else self._num_without_hit + prompt.is_first
        if prompt.keys is None:
            return
        num_matchable = max(0, num_tokens - 1) // self.block_size if prompt.reads_cache else 0
        num_found = num_cached // self.block_size
        for reuse in self._followed_by(row, now):
            reuse.add(prompt.keys, num_found, num_matchable, num_tokens, now, row.number)
        tip = self._tree.begin(prompt.tenant, prompt.sequence_ids, prompt.keys, now, prompt.passage)
        self._paths.note(prompt.passage, tip, len(prompt.keys))
        if prompt.pin_ttl_s:
            self._pin_ttls |= dict.fromkeys(prompt.sequence_ids, prompt.pin_ttl_s)

    def on_report(self, report: StepReport, tenants: Mapping[int, tuple[str, str]], now: float) -> None:
        """Follow a step's changes. `tenants`: tenant and model of its sequences, where known."""
        for at, sequence_id in enumerate(report.filled_ids):
            if sequence_id in tenants:
                row = self._row(*tenants[sequence_id])
                key = report.filled_keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
                for reuse in self._followed_by(row, now):
                    reuse.touch(key[:KEY_PREFIX_BYTES], now, row.number)
                self._tree.fill(sequence_id, key, now)
        for sequence_id, num_tokens in zip(report.pinned_ids, report.pinned_ends, strict=False):
            if sequence_id in tenants:
                for row in (self._row(*tenants[sequence_id]), self._all):
                    row.count_pinned(num_tokens, now)
                self._tree.pin(sequence_id, num_tokens // self.block_size, self._pin_ttls.get(sequence_id, 0))
        if report.removed_keys and self._all.reuse is not None:
            for number, idle_s in self._all.reuse.sketch.idle(report.removed_keys, int(now)):
                self._all.count_evicted(max(0, idle_s), now)
                if (owner := self._by_number.get(number)) is not None:
                    owner.count_evicted(max(0, idle_s), now)
        if report.num_pins_yielded:
            self._all.slice_at(now).num_yielded += report.num_pins_yielded

    def on_end(self, sequence_ids: Iterable[int], now: float) -> None:
        for sequence_id in sequence_ids:
            self._tree.end(sequence_id, now)
            self._pin_ttls.pop(sequence_id, None)

    def on_engine_gone(self, engine_id: int) -> None:
        """Forget what an engine had pinned."""
        self.num_pinned.pop(engine_id, None)

    def take_no_hits(self) -> CacheFigures | None:
        """Return the figures of all, once, when there were `NO_HITS_AFTER` requests and none of them had a hit."""
        if self._num_without_hit is None or self._num_without_hit < NO_HITS_AFTER:
            return None
        self._num_without_hit = None
        return self.overall()

    def overall(self) -> CacheFigures:
        """Return the figures of all tenants and models."""
        return self._all.figures(self._clock(), self._unix_time(), self.block_size)

    def figures(self, tenant: str | None = None, model: str | None = None) -> Iterator[CacheFigures]:
        """Yield the figures of each tenant and model, the last used ones first, as they are when it begins.

        Making one may take a millisecond, so the caller may wait between two. What was forgotten meanwhile is left out.
        """
        for its_tenant, its_model in reversed(list(self._rows)):
            if tenant in (None, its_tenant) and model in (None, its_model):
                row = self._rows.get((its_tenant, its_model))
                if row is not None:
                    yield row.figures(self._clock(), self._unix_time(), self.block_size)

    def tree(
        self, tenant: str | None = None, branch_id: str | None = None, depth: int = 1, request_id: str | None = None
    ) -> Iterator[TreeNode | None]:
        """Yield the cached branches of a tenant, or of all, or those below a branch, in `depth` levels, top first.

        `request_id`: the branches on its path come before all others, however deep they are and whether they are cached
        or not. Yields None between two, too, and the caller may wait after each: it gets branches as they are when they
        are made. Raises UnknownBranch and UnknownRequest.
        """
        view = TreeView(
            self._tree,
            self._paths,
            self.held_by,
            self.explained,
            block_size=self.block_size,
            now=self._clock(),
            unix_s=self._unix_time(),
        )
        return view.nodes(tenant, branch_id, depth, request_id)

    def pinned(self) -> PinnedNow:
        return PinnedNow(sum(self.num_pinned.values()), self._all.num_yielded(self._clock()))

    @property
    def num_bytes(self) -> int:
        """The memory of all sketches, about."""
        windows = {id(row.reuse): row.reuse for row in (self._all, *self._rows.values()) if row.reuse is not None}
        return sum(reuse.num_bytes for reuse in windows.values())

    def _row(self, tenant: str, model: str) -> CacheRow:
        """Return a tenant's row, which becomes the last used one."""
        row = self._rows.pop((tenant, model), None)
        if row is None:
            self._num_rows_made += 1
            row = CacheRow(tenant, model, self._num_rows_made, self.window_s)
            self._by_number[row.number] = row
            if len(self._rows) >= MAX_ROWS:
                oldest = self._rows.pop(next(iter(self._rows)))
                del self._by_number[oldest.number]
                self._followed = [one for one in self._followed if one is not oldest]
        self._rows[tenant, model] = row
        return row

    def _followed_by(self, row: CacheRow, now: float) -> list[ReuseWindow]:
        """Return the sketches that follow the blocks of a row: its own, if it may have one, and the shared one."""
        shared = self._all.reuse
        if row.reuse is None and self._may_be_followed(now):
            if shared is not None and any(one.reuse is shared for one in self._followed):
                self._all.reuse = shared = shared.copy()
            row.reuse = ReuseWindow.begin(self.window_s, partial(make_sketch, SAMPLED_KEYS, REGISTER_BITS), now)
            self._followed.append(row)
            if shared is None:
                self._all.reuse = shared = row.reuse
        return [reuse for reuse in {id(one): one for one in (row.reuse, shared)}.values() if reuse is not None]

    def _may_be_followed(self, now: float) -> bool:
        """Return whether there is room for another sketch; takes one from a row idle for a window if need be."""
        if len(self._followed) < MAX_FOLLOWED:
            return True
        idle = min(self._followed, key=attrgetter("used_at"))
        if now - idle.used_at < self.window_s:
            return False
        idle.reuse = None
        self._followed.remove(idle)
        return True
