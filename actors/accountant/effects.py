"""The reckoning: what a request's entries demand be done in the world, and is done once.

Used by the accountant. Reads a page of the daybook, makes its account, and compares what is due with what has been
done: counting an admission, telling the client its numbers, timing its first token, ending what failed, closing. An
account is made only where something has been written that may demand something: making it costs more than the rest.

What must always hold: counters of prompts and hits rise together, by one event; a prompt is counted only when the
journal has room for its record; an account closes once, with one outcome, and its client hears the end only when the
journal has let it go, save the end that a deadline makes, which waits for nobody.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import attrs
import structlog

from ..messages.counts import Count, Estimate, Known, billable, kind_of, shown
from ..messages.handler import Closed, Started
from ..messages.outcomes import ErrorKind, RequestError
from ..messages.prompts import CacheTtl
from ..messages.usage_record import UsageRecord
from ..request_desk.desk import Registry
from .account import Account
from .entry_store import MAX_DEATHS, CountedPrompt, Daybook, Page
from .journal import Journal
from .metrics import Metrics
from .prompt_account import PromptBook

log = structlog.get_logger()


class Reckoning:
    def __init__(self, daybook: Daybook, metrics: Metrics, registry: Registry, journal: Journal) -> None:
        self._daybook = daybook
        self._metrics = metrics
        self._registry = registry
        self._journal = journal

    def settle(self, page: Page, now: float) -> None:
        """Do everything that is due for one request."""
        self._daybook.in_hand = page
        if page.num_deaths >= MAX_DEATHS:
            self._give_up(page, now)
        else:
            account = None
            if page.num_changes != page.num_changes_settled:
                account = page.account()
                self._admit(page, account)
                self._time_first_token(page, account)
                self._tell_started(page, account)
                page.num_changes_settled = page.num_changes
            self._stop_failed(page)
            if page.is_late and not page.effects.is_answered:
                self._answer_late(page, account or page.account(), now)
            if page.may_close:
                self._close(page, account or page.account(), now)
        self._daybook.in_hand = None

    # ------------------------------------------------------------ admission

    def _admit(self, page: Page, account: Account) -> None:
        effects = page.effects
        due = [(i, p) for i, p in account.prompts.items() if p.is_admitted and i not in effects.counted_prompts]
        if not due:
            return
        so_far = account.record(account.admitted_at or account.received_at)
        is_first = not effects.counted_prompts
        if is_first:
            effects.retry_of = self._journal.retry_of(so_far)
        has_room = self._journal.admit(_retrying(so_far, effects.retry_of))
        if is_first and not has_room:
            effects.is_withdrawn = True
            account.withdraw()
            page.fail(RequestError(ErrorKind.OVERLOADED, "the usage ledger has no room for another record"))
            account.error, account.fault = page.error, page.fault
            return
        for index, prompt in due:
            before = list(effects.counted_prompts.values())
            effects.counted_prompts[index] = CountedPrompt(prompt.num_prompt_tokens, prompt.cached)
            self._count_admission(account, prompt, before)

    def _count_admission(self, account: Account, prompt: PromptBook, before: list[CountedPrompt]) -> None:
        """A prompt's numbers are frozen: one event raises every counter that they concern."""
        metrics, stats = self._metrics, self._daybook.stats
        cached = _num_known(prompt.cached)
        if not before:
            stats.total_requests += 1
            if account.admitted_at is not None:
                metrics.request_queue.observe(account.admitted_at - account.received_at)
        if cached and not any(_num_known(other.cached) for other in before):
            stats.hit_requests += 1
        stats.total_prompt_tokens += prompt.num_prompt_tokens
        stats.total_cached_tokens += cached
        metrics.prompt_tokens.inc(prompt.num_prompt_tokens)
        metrics.prefix_cache_queries.inc(prompt.num_prompt_tokens)
        metrics.prefix_cache_hits.inc(cached)
        if cached:
            metrics.count_cached(prompt.by_tier)
        if log.is_enabled_for(logging.DEBUG):
            miss = None if prompt.miss is None else f"{prompt.miss.reason} at token {prompt.miss.token}"
            log.debug("prefix_cache.stats", request_id=account.request_id, miss=miss, **stats.fields())

    # ------------------------------------------------------------ what the client hears

    def _time_first_token(self, page: Page, account: Account) -> None:
        if account.first_token_at is not None and not page.effects.timed_first_token:
            page.effects.timed_first_token = True
            self._metrics.time_to_first_token.observe(account.first_token_at - account.received_at)

    def _tell_started(self, page: Page, account: Account) -> None:
        """Its numbers, with the admission of each prompt and again with its first token, when more may be written."""
        if page.left or not account.admitted_prompts:
            return
        numbers = (
            shown(account.prompt_tokens),
            shown(account.cached),
            shown(account.cache_write),
            account.created(CacheTtl.FIVE_MINUTES),
            account.created(CacheTtl.ONE_HOUR),
            account.num_frozen_prompts,
        )
        if numbers != page.effects.told:
            page.effects.told = numbers
            page.opened.outlet.put(Started(*numbers[:5]))

    # ------------------------------------------------------------ the end

    def _stop_failed(self, page: Page) -> None:
        """One failed sequence fails its request and stops the others."""
        if page.error is not None and not page.effects.stopped:
            page.effects.stopped = True
            if not page.left:
                page.awaited = frozenset(self._registry.stop(page.request_id))

    def _answer_late(self, page: Page, account: Account, now: float) -> None:
        """A request's deadline has passed: its client is told at once, whatever the engine does. Its record follows."""
        page.effects.is_answered = True
        record = _retrying(account.record(now), page.effects.retry_of)
        page.opened.outlet.put(Closed(record, page.error, is_final=False))

    def _close(self, page: Page, account: Account, now: float) -> None:
        record = _retrying(account.record(now), page.effects.retry_of)
        if not page.effects.counted_end:
            page.effects.counted_end = True
            self._count_end(account, record, now)
        self._file(page, record)

    def _file(self, page: Page, record: UsageRecord) -> None:
        if not page.effects.is_filed:
            self._journal.close(record, partial(page.opened.outlet.put, Closed(record, page.error)))
            page.effects.is_filed = True
        if page.has_gap:
            for sequence_id in page.entries:
                self._registry.terminal(sequence_id)  # its own may be lost
        self._daybook.close(page)
        self._metrics.open_accounts.set(self._daybook.num_open_accounts)

    def _give_up(self, page: Page, now: float) -> None:
        """A request that kills its accountant: it fails, with the numbers that its client was told."""
        page.fail(RequestError(ErrorKind.INTERNAL, "the request could not be accounted for"))
        self._stop_failed(page)
        if not page.may_close:
            return
        record = page.bare_record(now)
        if not page.effects.counted_end:
            page.effects.counted_end = True
            log.error("account.given_up", **fields_of(record))
            self._metrics.usage_disputed.inc()
            self._metrics.count_request(record.outcome)
            self._metrics.generation_tokens.inc(record.completion_tokens)
        self._file(page, record)

    def _count_end(self, account: Account, record: UsageRecord, now: float) -> None:
        metrics = self._metrics
        if record.disputed:
            metrics.usage_disputed.inc()
            problems = account.problems()
            log.error("account.disputed", request_id=record.request_id, problems=problems, record=fields_of(record))
        metrics.count_request(record.outcome)
        metrics.generation_tokens.inc(record.completion_tokens)
        metrics.recomputed_tokens.inc(record.recomputed_tokens)
        if isinstance(record.cached, Known) and isinstance(record.prompt, Known) and record.prompt.n:
            metrics.request_cached_tokens.observe(record.cached.n)
            metrics.request_cache_hit_ratio.observe(record.cached.n / record.prompt.n)
        metrics.e2e_request_latency.observe(now - account.received_at)
        if log.is_enabled_for(logging.DEBUG):
            log.debug("account.closed", **fields_of(record))


def _retrying(record: UsageRecord, first: str | None) -> UsageRecord:
    return record if first is None else attrs.evolve(record, retry_of=first)


def _num_known(cached: Count) -> int:
    """Cached tokens where they were counted; an estimate is nobody's hit."""
    return billable(cached) or 0


def fields_of(record: UsageRecord) -> dict[str, Any]:
    """A record for a log line: numbers as numbers, and their kinds where they are not known."""
    fields = attrs.asdict(record, recurse=False)
    for name in ("prompt", "cached", "cache_write"):
        count = fields.pop(name)
        fields[f"{name}_tokens"] = shown(count)
        if isinstance(count, Estimate):
            fields[f"{name}_kind"] = kind_of(count)
    fields["cache_misses"] = [{"reason": str(m.reason), "token": m.token} for m in record.cache_misses]
    return fields
