"""Reports prompts to the cache watch, from a request's entries. Used by `effects.py`.

What must always hold: a prompt is watched once, with the numbers that its client gets; a prompt whose cached tokens the
engine did not count is not watched.
"""

from __future__ import annotations

from typing import Any

from ..cache_insight.cache_watch import CacheWatch, WatchedPrompt
from ..cache_insight.prefix_tree import Passage
from ..messages.block_manager import UNREAD
from ..messages.counts import Known
from ..shared.breakpoints import TTL_S
from .prompt_account import PromptAccount
from .request_entries import RequestEntries


def watch_prompt(
    watch: CacheWatch, request: RequestEntries, index: int, prompt: PromptAccount, *, is_first: bool, had_hit: bool
) -> None:
    """Have a prompt watched. `is_first`, `had_hit`: none of its request was counted before, or one that was a hit."""
    caller, prompted, admission = request.opened.caller, request.prompted, prompt.admission
    if not isinstance(prompt.cached, Known) or prompted is None or admission is None:
        return
    watched = WatchedPrompt(
        caller.tenant,
        caller.model,
        prompt.num_prompt_tokens,
        prompt.cached.n,
        prompted.block_keys[index] if index < len(prompted.block_keys) else None,
        reads_cache=admission.miss is None or admission.miss.reason not in UNREAD,
        is_first=is_first,
        is_first_hit=prompt.cached.n > 0 and not had_hit,
        sequence_ids=tuple(request.sequences_of[index]),
        pin_ttl_s=max((TTL_S[mark.ttl] for mark in prompt.breakpoints), default=0),
        passage=Passage(request.request_id, index),
    )
    watch.on_prompt(watched, admission.at)


def watch_upstream_prompt(watch: CacheWatch, request: RequestEntries, num_tokens: int, cached: int, now: float) -> None:
    """Have a prompt watched that an upstream has computed: nothing is known of its blocks."""
    caller = request.opened.caller
    watch.on_prompt(WatchedPrompt(caller.tenant, caller.model, num_tokens, cached, is_first_hit=cached > 0), now)


def warn_of_no_hits(watch: CacheWatch, log: Any) -> None:
    """Log once if many requests have found nothing."""
    figures = watch.take_no_hits()
    if figures is not None:
        reuse = figures.reuse
        log.warning(
            "prefix_cache.no_hits",
            num_requests=figures.num_requests,
            possible_hit_rate=round(reuse.hit_rate, 3) if reuse is not None and reuse.query_blocks else None,
            help="no prompt has been found in the cache so far; GET /v1/cache/stats says what could have been found",
        )
