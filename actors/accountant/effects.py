"""Applies each request's side effects exactly once. Used by the accountant.

Makes a request's account from its entries and compares what is due with what was applied: counting an admission,
telling the client its numbers, timing its first token, stopping what failed, closing. An account is only made after an
entry that may make something due, since making it costs more than the rest.

What must always hold: the counters of prompts and cache hits rise together, in one event; a prompt is counted only if
the journal has room for its record; an account closes once, with one outcome; its client sees the end only after the
journal has stored the record, except for a passed deadline, which is answered at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from ..messages.counts import UNKNOWN, Count, Estimate, Known, billable, estimated, kind_of, shown
from ..messages.handler import Closed, KeepAnswer, Started
from ..messages.outcomes import ErrorKind, RequestError
from ..messages.prompts import CacheTtl
from ..messages.tiers import Tier
from ..messages.usage_record import UsageRecord
from ..request_desk.desk import RequestDesk
from .account import Account
from .closing_explanations import ClosingExplanations
from .entry_store import MAX_CRASHES, EntryStore
from .journal import Journal
from .metrics import Metrics
from .prompt_account import UNATTRIBUTED, PromptAccount
from .request_entries import RequestEntries
from .watched_prompts import warn_of_no_hits, watch_prompt, watch_upstream_prompt

NO_ROOM = "The usage ledger has no room for another record."


class SideEffects:
    def __init__(self, store: EntryStore, metrics: Metrics, desk: RequestDesk, journal: Journal, log: Any) -> None:
        """`log` is the actor's structlog logger: this module has none."""
        self._store = store
        self._metrics = metrics
        self._desk = desk
        self._journal = journal
        self._log = log
        self.explanations = ClosingExplanations(store, desk, log)

    def apply_due(self, request: RequestEntries, now: float) -> None:
        self._store.current_request = request
        if request.num_crashes >= MAX_CRASHES:
            self._close_unaccountable(request, now)
        else:
            account: Account | None = None
            if request.num_changes != request.num_changes_settled:
                account = request.account()
                if request.upstream is None:
                    self._admit(request, account)
                else:
                    self._reserve(request, account, now)
                self._time_first_token(request, account)
                self._tell_started(request, account)
                request.num_changes_settled = request.num_changes
            self._stop_failed(request)
            if request.is_late and not request.applied.is_answered:
                self._answer_late(request, account or request.account(), now)
            if request.may_close:
                self._close(request, account or request.account(), now)
        self._store.current_request = None

    def _admit(self, request: RequestEntries, account: Account) -> None:
        applied = request.applied
        due = [(i, p) for i, p in account.prompts.items() if i not in applied.counted_prompts and p.is_admitted]
        if not due:
            return
        so_far = account.record(account.admitted_at or account.received_at)
        is_first = not applied.counted_prompts
        if is_first:
            applied.retry_of = self._journal.retry_of(so_far)
        has_room = self._journal.admit(_with_retry(so_far, request))
        if is_first and not has_room:
            self._withdraw(request, account)
            return
        applied.note_first_admission(account)
        for index, prompt in due:
            is_first, had_hit = not applied.counted_prompts, applied.had_hit
            applied.count(index, prompt.num_prompt_tokens, prompt.cached)
            self._count_admission(account, prompt, is_first=is_first, had_hit=had_hit)
            watch_prompt(self._store.cache, request, index, prompt, is_first=is_first, had_hit=had_hit)
        warn_of_no_hits(self._store.cache, self._log)

    def _reserve(self, request: RequestEntries, account: Account, now: float) -> None:
        """Reserve room for the record of a request that is passed on, and count its prompt once its size is known."""
        applied = request.applied
        if applied.engine_id is None and not applied.is_withdrawn:
            applied.retry_of = self._journal.retry_of(account.opening_record())
        if applied.engine_id != account.engine_id and not applied.is_withdrawn:
            applied.engine_id = account.engine_id
            if not self._journal.admit(_with_retry(account.opening_record(), request)):
                self._withdraw(request, account)
        prompt, cached = UNKNOWN if account.upstream is None else account.upstream.usage.prompt, account.cached
        if isinstance(prompt, Known) and not applied.counted_prompts:
            applied.count(0, prompt.n, cached)
            self._count_prompt(account.engine_id, prompt.n, cached)
            if isinstance(cached, Known):
                self._store.stats.total_requests += 1
                self._store.stats.hit_requests += cached.n > 0
                self._metrics.count_cached({UNATTRIBUTED: cached.n}, account.engine_id)
                watch_upstream_prompt(self._store.cache, request, prompt.n, cached.n, now)
                warn_of_no_hits(self._store.cache, self._log)

    def _withdraw(self, request: RequestEntries, account: Account) -> None:
        """Fail a request for whose record the journal has no room, before anything of it is counted."""
        request.applied.is_withdrawn = True
        account.withdraw()
        request.fail(RequestError(ErrorKind.OVERLOADED, NO_ROOM))
        account.error, account.fault = request.error, request.fault

    def _count_prompt(self, engine_id: int | None, num_tokens: int, cached: Count) -> None:
        """Raise the counters of all prompts. What was not counted is neither hit nor miss."""
        metrics, stats = self._metrics, self._store.stats
        metrics.prompt_tokens.inc(num_tokens, engine_id)
        if isinstance(cached, Known):
            stats.total_prompt_tokens += num_tokens
            stats.total_cached_tokens += cached.n
            metrics.prefix_cache_queries.inc(num_tokens, engine_id)
            metrics.prefix_cache_hits.inc(cached.n, engine_id)

    def _count_admission(self, account: Account, prompt: PromptAccount, *, is_first: bool, had_hit: bool) -> None:
        """Raise every counter that a prompt's frozen numbers concern, in one event."""
        metrics, stats, engine_id = self._metrics, self._store.stats, account.engine_id
        cached = _num_known(prompt.cached)
        if is_first:
            stats.total_requests += 1
            if account.admitted_at is not None:
                metrics.request_queue.observe(account.admitted_at - account.received_at, engine_id=engine_id)
        if cached and not had_hit:
            stats.hit_requests += 1
        self._count_prompt(engine_id, prompt.num_prompt_tokens, prompt.cached)
        if cached:
            metrics.count_cached(prompt.by_tier, engine_id)
            stats.total_host_tokens += prompt.by_tier[Tier.HOST]
            stats.total_disk_tokens += prompt.by_tier[Tier.DISK]
            stats.total_remote_tokens += prompt.by_tier[Tier.REMOTE]
        if prompt.estimated is not None and isinstance(prompt.cached, Known):
            error = abs(prompt.estimated - prompt.cached.n)
            metrics.router_overlap_error.observe(error, engine_id=prompt.engine_id)
        if self._log.is_enabled_for(logging.DEBUG):
            miss = None if prompt.miss is None else f"{prompt.miss.reason} at token {prompt.miss.token}"
            self._log.debug("prefix_cache.stats", request_id=account.request_id, miss=miss, **stats.fields())

    def _time_first_token(self, request: RequestEntries, account: Account) -> None:
        at = None if account.admitted_at is None else account.first_token_at
        if at is not None and not request.applied.timed_first_token:
            request.applied.timed_first_token = True
            self._metrics.time_to_first_token.observe(at - account.received_at, engine_id=account.engine_id)

    def _tell_started(self, request: RequestEntries, account: Account) -> None:
        """Send the numbers at the admission of each prompt, and again if more was written by its first token."""
        if request.left or not account.admitted_prompts:
            return
        numbers = (
            shown(account.prompt_tokens),
            billable(account.cached),
            shown(account.cache_write),
            account.created(CacheTtl.FIVE_MINUTES),
            account.created(CacheTtl.ONE_HOUR),
            estimated(account.cached),
            account.num_frozen_prompts,
        )
        if numbers != request.applied.told:
            request.applied.told = numbers
            request.opened.outlet.put(Started(*numbers[:6], account.told_by_prompt()))

    def _stop_failed(self, request: RequestEntries) -> None:
        """Stop all sequences of a failed request: one failed sequence fails the request."""
        if request.error is not None and not request.applied.stopped:
            request.applied.stopped = True
            if not request.left:
                request.awaited = frozenset(self._desk.stop(request.request_id))

    def _answer_late(self, request: RequestEntries, account: Account, now: float) -> None:
        """Tell the client at once that its deadline has passed, whatever the engine does. The record follows."""
        request.applied.is_answered = True
        record = _with_retry(account.record(now), request)
        request.opened.outlet.put(Closed(record, request.error, is_final=False))

    def _close(self, request: RequestEntries, account: Account, now: float) -> None:
        record = _with_retry(account.record(now), request)
        if not request.applied.counted_end:
            request.applied.counted_end = True
            self._count_end(account, record, now)
        if not request.applied.is_filed:
            self.explanations.keep(request, account, record)
        self._file(request, record, now)

    def _file(self, request: RequestEntries, record: UsageRecord, now: float) -> None:
        if not request.applied.is_filed:
            opened, closed = request.opened, Closed(record, request.error)
            self._store.filed.add(opened, closed)
            write = partial(self._journal.close, record, partial(self._release, request.request_id))
            write() if opened.keep is None else self._keep(opened.keep, closed, write)
            request.applied.is_filed = True
        if request.has_gap:
            for sequence_id in request.entries:
                self._desk.sequences.mark_ended(sequence_id)  # its own Terminal may be lost
        self._store.cache.on_end(request.entries, now)
        self._store.close(request)
        self._metrics.open_accounts.set(self._store.num_open_accounts)

    def _keep(self, keep: KeepAnswer, closed: Closed, write: Callable[[], object]) -> None:
        """Have an answer kept before its record is written, which may be after this returns."""
        try:
            keep(closed, partial(self._write_now, write))
        except Exception:
            self._log.exception("keep.failed")
            write()

    def _write_now(self, write: Callable[[], object]) -> None:
        write()
        self._journal.flush()

    def _release(self, request_id: str) -> None:
        """Let the client see the end. An error in its own outlet must not affect the requests after it."""
        try:
            self._store.filed.release(request_id)
        except Exception:
            self._log.exception("release.failed")

    def _close_unaccountable(self, request: RequestEntries, now: float) -> None:
        """Fail a request that makes the accountant crash, with the numbers that its client was told."""
        self._store.num_given_up += 1
        request.fail(RequestError(ErrorKind.INTERNAL, "The request could not be accounted for."))
        self._stop_failed(request)
        if not request.may_close:
            return
        record = request.bare_record(now)
        if not request.applied.counted_end:
            request.applied.counted_end = True
            self._log.error("account.given_up", **fields_of(record))
            self._metrics.usage_disputed.inc(1, record.engine)
            self._metrics.requests.inc(1, record.engine, record.outcome)
            self._metrics.generation_tokens.inc(record.completion_tokens, record.engine)
        self._file(request, record, now)

    def _count_end(self, account: Account, record: UsageRecord, now: float) -> None:
        metrics, log, engine_id = self._metrics, self._log, record.engine
        if record.disputed:
            metrics.usage_disputed.inc(1, engine_id)
            problems = account.problems()
            log.error("account.disputed", request_id=record.request_id, problems=problems, record=fields_of(record))
        metrics.requests.inc(1, engine_id, record.outcome)
        if record.adapter is not None:
            metrics.adapter_requests.inc(1, engine_id, record.model)
        metrics.generation_tokens.inc(record.completion_tokens, engine_id)
        metrics.recomputed_tokens.inc(record.recomputed_tokens, engine_id)
        for receiver_id, num_tokens in account.moved.items():
            metrics.moved_tokens.inc(num_tokens, receiver_id)
        for sequence in account.sequences.values():
            metrics.count_drafts(sequence.drafted, engine_id)
        outputs = [sequence.num_completion_tokens for sequence in account.sequences.values()]
        metrics.ended.count_end(record, max(outputs, default=record.completion_tokens))
        metrics.e2e_request_latency.observe(now - account.received_at, engine_id=engine_id)
        if log.is_enabled_for(logging.DEBUG):
            log.debug("account.closed", **fields_of(record))


def _with_retry(record: UsageRecord, request: RequestEntries) -> UsageRecord:
    retry_of = request.applied.retry_of
    return record if retry_of is None else attrs.evolve(record, retry_of=retry_of)


def _num_known(cached: Count) -> int:
    """Return cached tokens that were counted; an estimate does not count as a hit."""
    return billable(cached) or 0


def fields_of(record: UsageRecord) -> dict[str, Any]:
    """Return a record as fields of a log line, with the kind of each estimated count."""
    fields = attrs.asdict(record, recurse=False)
    for name in ("prompt", "cached", "cache_write"):
        count = fields.pop(name)
        fields[f"{name}_tokens"] = shown(count)
        if isinstance(count, Estimate):
            fields[f"{name}_kind"] = kind_of(count)
    fields["cache_misses"] = [{"reason": str(m.reason), "token": m.token} for m in record.cache_misses]
    return fields
