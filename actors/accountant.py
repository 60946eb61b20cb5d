"""The usage accountant: one account a request, two independent entries for every prompt position.

Hears of a request's opening and leaving, of its prompts, of every step, of what its client was given, and of an
engine's death, in one inbox. Books first, then passes the step's tokens on: so `Admitted` numbers reach the client's
outlet before its first token. Every rule of the numbers is in `core/account.py`.

    open ──▶ prompted ──▶ admitted ──▶ every sequence: Terminal (engine) and Completed (detokenizer) ──▶ closed
                └─ refused, failed, left: what was submitted is ended first, then the same

What must always hold: an account closes once, with one outcome; its numbers are frozen at the first admission;
counters of prompts and hits rise together; no account outlives its request and its sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import structlog
import trio

from quipu.actors.channel import Receiver, Sender
from quipu.actors.core.account import Account, PromptBook
from quipu.actors.messages import (
    CacheMiss,
    Closed,
    Completed,
    EngineDied,
    ErrorKind,
    Left,
    MissReason,
    OpenAccount,
    Outlet,
    Prompted,
    Refused,
    RequestError,
    Started,
    StepReport,
    Tokens,
)
from quipu.actors.metrics import Metrics
from quipu.actors.registry import Registry

log = structlog.get_logger()

AccountantMessage = OpenAccount | Prompted | Refused | StepReport | Completed | Left | EngineDied


@attrs.define
class CacheStats:
    """Cumulative, for the life of the web process: what `prefix_cache.stats` says."""

    total_requests: int = 0
    hit_requests: int = 0
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0

    def fields(self) -> dict[str, int | float]:
        return {
            "total_requests": self.total_requests,
            "hit_requests": self.hit_requests,
            "miss_requests": self.total_requests - self.hit_requests,
            "hit_rate": self.hit_requests / max(1, self.total_requests),
            "total_prompt_tokens": self.total_prompt_tokens,
            "total_cached_tokens": self.total_cached_tokens,
            "token_hit_rate": self.total_cached_tokens / max(1, self.total_prompt_tokens),
        }


class Accountant:
    def __init__(
        self, metrics: Metrics, registry: Registry, detokenizer: Sender[Tokens], *, num_usable_blocks: int
    ) -> None:
        self._metrics = metrics
        self._registry = registry
        self._detokenizer = detokenizer
        self._num_usable_blocks = num_usable_blocks
        self._accounts: dict[str, Account] = {}
        self._outlets: dict[str, Outlet] = {}
        self._by_sequence: dict[int, Account] = {}
        self._last_token_at: dict[int, float] = {}
        self.stats = CacheStats()
        metrics.set_blocks(total=num_usable_blocks, free=num_usable_blocks, cached=0)

    @property
    def num_open_accounts(self) -> int:
        return len(self._accounts)

    async def run(self, inbox: Receiver[AccountantMessage]) -> None:
        """Keep the books until cancelled."""
        while True:
            for message in await inbox.receive_all():
                match message:
                    case StepReport():
                        await self._on_report(message)
                    case Completed():
                        self._on_completed(message)
                    case OpenAccount():
                        self._on_open(message)
                    case Prompted():
                        self._on_prompted(message)
                    case Left():
                        self._on_left(message)
                    case Refused():
                        self._fail(message.request_id, message.error)
                    case EngineDied():
                        self._on_engine_died(message)

    # ------------------------------------------------------------ opening

    def _on_open(self, message: OpenAccount) -> None:
        self._accounts[message.request_id] = Account(message.request_id, message.endpoint, message.received_at)
        self._outlets[message.request_id] = message.outlet
        self._metrics.open_accounts.set(len(self._accounts))

    def _on_prompted(self, message: Prompted) -> None:
        account = self._accounts.get(message.request_id)
        if account is None:
            return  # left meanwhile; nothing of it was submitted
        for sequence_id, prompt, choice, num_tokens in zip(
            message.sequence_ids,
            message.prompt_indexes,
            message.choice_indexes,
            message.num_prompt_tokens,
            strict=True,
        ):
            account.prompted(sequence_id, prompt, choice, num_tokens)
            self._by_sequence[sequence_id] = account

    # ------------------------------------------------------------ one step

    async def _on_report(self, report: StepReport) -> None:
        now = trio.current_time()
        accounts = self._by_sequence
        for sequence_id, number, reused, read, reason, token in zip(
            report.admitted_ids,
            report.admitted_number,
            report.admitted_reused,
            report.admitted_read,
            report.admitted_miss_reasons,
            report.admitted_miss_tokens,
            strict=True,
        ):
            if (account := accounts.get(sequence_id)) is not None:
                miss = CacheMiss(MissReason(reason), token)
                prompt = account.admit(sequence_id, number, reused, read, miss)
                if prompt is not None:
                    self._count_admission(account, prompt, now)
        for sequence_id, start, end in zip(report.span_ids, report.span_starts, report.span_ends, strict=True):
            if (account := accounts.get(sequence_id)) is not None:
                account.books[sequence_id].compute(start, end)
        for sequence_id, start, end in zip(report.written_ids, report.written_starts, report.written_ends, strict=True):
            if (account := accounts.get(sequence_id)) is not None:
                account.write(sequence_id, start, end)
        self._time_tokens(report.token_sequence_ids, now)
        if report.token_ids:
            await self._detokenizer.send(
                Tokens(report.token_sequence_ids, report.token_ids, report.ended_ids, report.ended_reasons)
            )
        self._set_gauges(report)
        for sequence_id, error, kind in zip(
            report.terminal_ids, report.terminal_errors, report.terminal_error_kinds, strict=True
        ):
            self._on_terminal(sequence_id, error, kind)

    def _count_admission(self, account: Account, prompt: PromptBook, now: float) -> None:
        """A prompt's numbers are frozen: one event raises every counter that they concern."""
        metrics, stats = self._metrics, self.stats
        cached = prompt.cached or 0
        first_prompt = account.admitted_at is None
        if first_prompt:
            account.admitted_at = now
            stats.total_requests += 1
            metrics.request_queue.observe(now - account.received_at)
        if cached and account.num_cached_tokens == cached:  # the request's first prompt that hits
            stats.hit_requests += 1
        stats.total_prompt_tokens += prompt.num_prompt_tokens
        stats.total_cached_tokens += cached
        metrics.prompt_tokens.inc(prompt.num_prompt_tokens)
        metrics.prefix_cache_queries.inc(prompt.num_prompt_tokens)
        metrics.prefix_cache_hits.inc(cached)
        metrics.cached_tokens.inc(cached)
        miss = None if prompt.miss is None else f"{prompt.miss.reason} at token {prompt.miss.token}"
        log.debug("prefix_cache.stats", request_id=account.request_id, miss=miss, **stats.fields())
        self._tell_started(account)

    def _tell_started(self, account: Account) -> None:
        outlet = self._outlets.get(account.request_id)
        if outlet is not None and not account.leaving:
            outlet.put(Started(account.num_prompt_tokens, account.num_cached_tokens, account.num_written_tokens))

    def _time_tokens(self, sequence_ids: Iterable[int], now: float) -> None:
        observe, last = self._metrics.inter_token_latency.observe, self._last_token_at
        for sequence_id in sequence_ids:
            before = last.get(sequence_id)
            if before is not None:
                observe(now - before)
            elif (account := self._by_sequence.get(sequence_id)) is None:
                continue
            else:
                self._on_first_token(account, sequence_id, now)
            last[sequence_id] = now

    def _on_first_token(self, account: Account, sequence_id: int, now: float) -> None:
        if account.first_token_at is None:
            account.first_token_at = now
            self._metrics.time_to_first_token.observe(now - account.received_at)
        if account.first_token(sequence_id):
            self._tell_started(account)

    def _set_gauges(self, report: StepReport) -> None:
        metrics = self._metrics
        metrics.num_requests_running.set(report.num_running)
        metrics.num_requests_waiting.set(report.num_waiting)
        metrics.set_blocks(total=self._num_usable_blocks, free=report.num_free_blocks, cached=report.num_cached_blocks)
        if report.num_preempted:
            metrics.num_preemptions.inc(report.num_preempted)

    # ------------------------------------------------------------ ends

    def _on_terminal(self, sequence_id: int, error: str | None, kind: str | None) -> None:
        self._registry.terminal(sequence_id)
        self._last_token_at.pop(sequence_id, None)
        account = self._by_sequence.get(sequence_id)
        if account is None:
            return
        account.books[sequence_id].terminal = True
        if error is not None:
            self._fail(account.request_id, RequestError(ErrorKind(kind or ErrorKind.INTERNAL), error))
        else:
            self._close_if_done(account)

    def _on_completed(self, message: Completed) -> None:
        account = self._by_sequence.get(message.sequence_id)
        if account is None:
            return
        book = account.books[message.sequence_id]
        book.completed = True
        book.num_completion_tokens = message.num_completion_tokens
        book.finish_reason = message.finish_reason
        self._close_if_done(account)

    def _on_left(self, message: Left) -> None:
        account = self._accounts.get(message.request_id)
        if account is None:
            return  # closed before its client was answered
        account.leaving = True
        account.wait_only_for(message.submitted_ids)
        self._close_if_done(account)

    def _fail(self, request_id: str, error: RequestError) -> None:
        """One failed sequence fails its request and stops the others."""
        account = self._accounts.get(request_id)
        if account is None:
            return
        if account.error is None:
            account.error = error
        if not account.leaving:
            account.wait_only_for(self._registry.stop(request_id))
        self._close_if_done(account)

    def _on_engine_died(self, message: EngineDied) -> None:
        metrics, total = self._metrics, self._num_usable_blocks
        metrics.num_requests_running.set(0)
        metrics.num_requests_waiting.set(0)
        metrics.set_blocks(total=total, free=total, cached=0)  # its blocks are gone, and the next one's are all free
        for sequence_id in message.held_ids:
            self._on_terminal(sequence_id, f"the engine died: {message.reason}", ErrorKind.INTERNAL)

    def _close_if_done(self, account: Account) -> None:
        if account.may_close:
            self._close(account)

    def _close(self, account: Account) -> None:
        now = trio.current_time()
        metrics = self._metrics
        del self._accounts[account.request_id]
        outlet = self._outlets.pop(account.request_id)
        for sequence_id in account.books:
            del self._by_sequence[sequence_id]
            self._last_token_at.pop(sequence_id, None)
        record = account.record()
        problems = account.problems()
        if problems:
            metrics.usage_disputed.inc()
            log.error("account.disputed", request_id=account.request_id, problems=problems, record=attrs.asdict(record))
        metrics.count_request(record.outcome)
        metrics.generation_tokens.inc(record.completion_tokens)
        metrics.recomputed_tokens.inc(record.recomputed_tokens)
        if record.cached_tokens is not None and record.prompt_tokens:
            metrics.request_cached_tokens.observe(record.cached_tokens)
            metrics.request_cache_hit_ratio.observe(record.cached_tokens / record.prompt_tokens)
        metrics.e2e_request_latency.observe(now - account.received_at)
        metrics.open_accounts.set(len(self._accounts))
        log.debug(
            "account.closed",
            request_id=account.request_id,
            endpoint=account.endpoint,
            **{k: v for k, v in attrs.asdict(record).items() if k != "request_id"},
        )
        outlet.put(Closed(record, account.error))
