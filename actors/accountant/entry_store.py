"""The daybook: what the accountant has heard of every open request, kept where its death does not reach.

An account is a function of its entries, and the daybook has the entries until the account closes, together with which
of their effects on the world (counters, journal, client) have been made. The accountant keeps nothing else, so a new
one goes on where the old one died. Owned by `wiring`, written by the accountant; synchronous.

    inbox ──take──▶ pending ──▶ written into the requests' pages ──▶ effects that are due ──▶ done

What must always hold: a message is written once, whole, and leaves `pending` only after its effects; an effect's mark
is set in the same breath as the effect.
"""

from __future__ import annotations

from collections import deque

import attrs

from ..messages.accountant import Completed, EngineDied, Left, OpenAccount, Prompted, Refused, StepReport
from ..messages.counts import UNKNOWN, Count, Known, total
from ..messages.outcomes import ErrorKind, Fault, Outcome, RequestError
from ..messages.usage_record import UsageRecord
from .account import Account, Ended, Entry, Gap, Span

AccountantMessage = OpenAccount | Prompted | Refused | StepReport | Completed | Left | EngineDied

_ENDS = (Ended, Gap)

MAX_DEATHS = 2
"""A request in whose hands the accountant dies this often is failed."""


@attrs.define(eq=False)
class Pending:
    """A message on its way through the accountant."""

    message: AccountantMessage
    at: float
    """When it was taken: what its entries are dated, however often it is looked at."""
    is_written: bool = False
    is_timed: bool = False
    is_passed_on: bool = False
    """Its tokens are with the detokenizer."""
    is_shown: bool = False
    """Its gauges are set and its preemptions counted."""


@attrs.frozen
class CountedPrompt:
    """A prompt as the counters took it."""

    num_prompt_tokens: int
    cached: Count


@attrs.define
class Effects:
    """What has been done about a request, so that nothing is done twice."""

    counted_prompts: dict[int, CountedPrompt] = attrs.field(factory=dict)
    """By index."""
    is_withdrawn: bool = False
    """The journal had no room for it: its prompts are nobody's hits."""
    told: tuple[int | None, ...] = ()
    """The numbers that its client was last told."""
    retry_of: str | None = None
    timed_first_token: bool = False
    stopped: bool = False
    is_answered: bool = False
    """Its client has been told that its deadline has passed, before the engine had ended it."""
    counted_end: bool = False
    is_filed: bool = False
    """The journal has its record."""


@attrs.define(eq=False)
class Page:
    """Everything heard of one open request, in order."""

    opened: OpenAccount
    opened_unix_s: float
    prompted: Prompted | None = None
    entries: dict[int, list[Entry]] = attrs.field(factory=dict)
    """By sequence."""
    num_changes: int = 0
    """Entries of which something may have to be done before the end."""
    num_changes_settled: int | None = None
    """How many of them there were when all that was due had been done."""
    num_ends: int = 0
    """Entries that say that a sequence has ended, or may have."""
    has_gap: bool = False
    """A report that may have concerned it was lost."""
    completed: dict[int, Completed] = attrs.field(factory=dict)
    error: RequestError | None = None
    """Why it fails: the first reason that was heard."""
    fault: Fault | None = None
    """Set where that reason is a failure of the server's, and the client was still there."""
    left: bool = False
    awaited: frozenset[int] | None = None
    """Those of its sequences that an engine was given, once no other can follow; None: all of them."""
    num_deaths: int = 0
    """Times that the accountant died while it had this request in hand."""
    effects: Effects = attrs.field(factory=Effects)

    @property
    def request_id(self) -> str:
        return self.opened.request_id

    @property
    def is_late(self) -> bool:
        """It fails because its deadline has passed."""
        return self.error is not None and self.error.kind is ErrorKind.TIMEOUT

    def note(self, sequence_id: int, entry: Entry) -> None:
        """Write one entry down."""
        self.entries[sequence_id].append(entry)
        if type(entry) in _ENDS:
            self.num_ends += 1
            self.has_gap |= type(entry) is Gap
        else:
            self.num_changes += 1

    def fail(self, error: RequestError, fault: Fault | None = None) -> None:
        """Write down why the request fails; what is heard after the first reason changes nothing."""
        if self.error is None:
            self.error = error
            self.fault = None if self.left else fault  # a client that has left has ended it before the server did

    def span(self, sequence_id: int, start: int, end: int) -> None:
        """Write computed positions down; those that go on where the last ones ended make one entry with them."""
        entries = self.entries[sequence_id]
        if entries:
            last = entries[-1]
            if type(last) is Span and last.end == start:
                last.end = end
                return
        entries.append(Span(start, end))

    @property
    def may_close(self) -> bool:
        """Every sequence that an engine was given has ended there, and its completion tokens are known.

        One whose Terminal may be lost is not waited for beyond its completion.
        """
        if self.error is None and not self.left and self.prompted is None:
            return False
        awaited = self.entries.keys() if self.awaited is None else self.awaited & self.entries.keys()
        if self.num_ends < len(awaited) or len(self.completed) < len(awaited):
            return False
        return all(i in self.completed and any(type(entry) in _ENDS for entry in self.entries[i]) for i in awaited)

    def _open_account(self) -> Account:
        opened = self.opened
        return Account(
            opened.request_id, opened.endpoint, opened.received_at, opened.caller, self.opened_unix_s, opened.seed
        )

    def account(self) -> Account:
        """The account that these entries make."""
        account = self._open_account()
        if (prompted := self.prompted) is not None:
            for sequence_id, prompt, choice, num_tokens, breakpoints in zip(
                prompted.sequence_ids,
                prompted.prompt_indexes,
                prompted.choice_indexes,
                prompted.num_prompt_tokens,
                prompted.breakpoints or [()] * len(prompted.sequence_ids),
                strict=True,
            ):
                account.prompted(sequence_id, prompt, choice, num_tokens, breakpoints)
        for sequence_id, entries in self.entries.items():
            for entry in entries:
                account.apply(sequence_id, entry)
        for completed in self.completed.values():
            account.complete(completed.sequence_id, completed.num_completion_tokens, completed.finish_reason)
        account.error, account.fault = self.error, self.fault
        if self.effects.is_withdrawn:
            account.withdraw()
        return account

    def bare_record(self, now: float) -> UsageRecord:
        """The record of a request whose entries cannot be booked: disputed, with what was counted and told."""
        effects = self.effects
        account = self._open_account()
        account.error, account.fault = self.error, self.fault
        record = account.record(now)
        counted = effects.counted_prompts.values()
        written = effects.told[2] if effects.told else None
        created_5m, created_1h = (*(n or 0 for n in effects.told[3:5]), 0, 0)[:2]
        return attrs.evolve(
            record,
            outcome=Outcome.FAILED,
            created_5m_tokens=created_5m,
            created_1h_tokens=created_1h,
            prompt=total(Known(prompt.num_prompt_tokens) for prompt in counted),
            cached=total(prompt.cached for prompt in counted),
            cache_write=UNKNOWN if written is None else Known(written),
            completion_tokens=sum(c.num_completion_tokens for c in self.completed.values()),
            retry_of=effects.retry_of,
            disputed=True,
        )


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


@attrs.define(eq=False)
class Daybook:
    pages: dict[str, Page] = attrs.field(factory=dict)
    """Of open accounts, by request."""
    by_sequence: dict[int, Page] = attrs.field(factory=dict)
    last_token_at: dict[int, float] = attrs.field(factory=dict)
    """By sequence, since its first token."""
    pending: deque[Pending] = attrs.field(factory=deque)
    in_hand: Page | None = None
    """The request that is being looked at: the one to blame for a death."""
    num_reports: int = 0
    """Step reports heard of the living engine."""
    stats: CacheStats = attrs.field(factory=CacheStats)

    @property
    def num_open_accounts(self) -> int:
        return len(self.pages)

    def open(self, opened: OpenAccount, unix_s: float) -> None:
        self.pages[opened.request_id] = Page(opened, unix_s)

    def prompted(self, message: Prompted) -> None:
        """Nothing happens where the request has left meanwhile: nothing of it was submitted."""
        page = self.pages.get(message.request_id)
        if page is not None:
            page.prompted = message
            for sequence_id in message.sequence_ids:
                page.entries[sequence_id] = []
                self.by_sequence[sequence_id] = page

    def close(self, page: Page) -> None:
        """Its record is made: nothing more can concern it."""
        del self.pages[page.request_id]
        for sequence_id in page.entries:
            del self.by_sequence[sequence_id]
            self.last_token_at.pop(sequence_id, None)

    def blame(self) -> str | None:
        """The accountant has died: the request that was in its hands, if any."""
        page, self.in_hand = self.in_hand, None
        if page is None:
            return None
        page.num_deaths += 1
        return page.request_id
