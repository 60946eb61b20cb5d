"""The entry store: everything the accountant has received about open requests, kept where its crash cannot lose it.

An account is a function of its entries. The store keeps them until the account closes, with the side effects that have
been applied, so that the accountant's successor continues where it crashed. Owned by `wiring`, written by the
accountant.

    inbox ──▶ pending ──▶ written into the requests' entries ──▶ side effects that are due ──▶ done

What must always hold: a message is written once and completely, and leaves `pending` only after its side effects; a
side effect and the flag that it was applied are set without a checkpoint between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import attrs

from ..cache_insight.cache_figures import CacheStats
from ..cache_insight.cache_watch import CacheWatch
from ..cache_insight.explanation_store import ExplanationStore
from ..messages.accountant import EngineDied, OpenAccount, Prompted, Routed, StepReport, Unsent
from ..messages.explanations import ExplainedPrompt
from .filed_requests import FiledRequests
from .request_entries import RequestEntries, RequestMessage

AccountantMessage = OpenAccount | Prompted | StepReport | EngineDied | Unsent | Routed | RequestMessage

MAX_CRASHES = 2
"""A request on which the accountant crashes this often is failed."""


@attrs.define(eq=False)
class Pending:
    """A message that the accountant is handling or will handle, and how far it got."""

    message: AccountantMessage
    at: float
    """When it was received: the time of its entries, however often handling it is retried."""
    is_written: bool = False
    concerned: list[RequestEntries] = attrs.field(factory=list)
    """The requests that it may make side effects due for, noted when it is written; those that it ends apart."""
    ended: list[RequestEntries] = attrs.field(factory=list)
    """The requests of which a step report ends sequences."""
    is_timed: bool = False
    is_passed_on: bool = False
    is_shown: bool = False
    """Its gauges were set and its preemptions counted."""


@attrs.define(eq=False)
class EntryStore:
    requests: dict[str, RequestEntries] = attrs.field(factory=dict)
    """Open accounts, by request id."""
    by_sequence: dict[int, RequestEntries] = attrs.field(factory=dict)
    last_token_at: dict[int, float] = attrs.field(factory=dict)
    """By sequence id, once it has a token."""
    pending: deque[Pending] = attrs.field(factory=deque)
    current_request: RequestEntries | None = None
    """The request being handled: the suspect if the accountant crashes."""
    num_handled: int = 0
    """Messages that were handled without giving up a request."""
    num_given_up: int = 0
    """Times that a message concerned a request on which the accountant crashed too often."""
    num_reports: dict[int, int] = attrs.field(factory=dict)
    """By engine, the number of the last step report of its present process."""
    last_dead: dict[int, int] = attrs.field(factory=dict)
    """By engine, its last incarnation that has died."""
    stats: CacheStats = attrs.field(factory=CacheStats)
    cache: CacheWatch = attrs.field(factory=CacheWatch)
    explanations: ExplanationStore = attrs.field(factory=ExplanationStore)
    filed: FiledRequests = attrs.field(factory=FiledRequests)

    @property
    def num_open_accounts(self) -> int:
        return len(self.requests)

    def requests_of(self, sequence_ids: Iterable[int]) -> list[RequestEntries]:
        """Return the open requests of sequences, each once."""
        by_sequence = self.by_sequence
        found = {id(request): request for i in sequence_ids if (request := by_sequence.get(i)) is not None}
        return list(found.values())

    def is_open(self, request: RequestEntries) -> bool:
        return self.requests.get(request.request_id) is request

    def open(self, opened: OpenAccount, unix_s: float) -> None:
        self.requests[opened.request_id] = RequestEntries(opened, unix_s)

    def add_prompts(self, message: Prompted) -> None:
        """Register a request's sequences. Does nothing if it has left meanwhile, since none was submitted."""
        request = self.requests.get(message.request_id)
        if request is not None:
            request.add_sequences(message)
            self.explanations.name_sequences(message, request.opened.caller.tenant)
            self.by_sequence.update(dict.fromkeys(message.sequence_ids, request))

    def known_prompt(self, request_id: str, index: int) -> ExplainedPrompt | None:
        """Return what is known of a prompt; of an open request's, only where its messages lie."""
        request = self.requests.get(request_id)
        if request is None:
            return self.explanations.prompt(request_id, index)
        notes = () if request.prompted is None else request.prompted.notes
        return ExplainedPrompt(None, None, None, None, outline=notes[index].outline) if index < len(notes) else None

    def close(self, request: RequestEntries) -> None:
        del self.requests[request.request_id]
        for sequence_id in request.entries:
            del self.by_sequence[sequence_id]
            self.last_token_at.pop(sequence_id, None)

    def record_crash(self) -> str | None:
        """Count a crash of the accountant, and return the id of the request that it was handling, if any."""
        request, self.current_request = self.current_request, None
        if request is None:
            return None
        request.num_crashes += 1
        request.forget_parts()
        return request.request_id
