"""What is booked of a request whoever answers it: who asked, when, by which engine it was served, and how it ended.

`account.py` adds what an engine of this server reports, `upstream_account.py` what an upstream says. Pure.

What must always hold: a record shows what the account says and nothing else; a withdrawn request shows no engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..messages.accountant import OpenAccount
from ..messages.counts import Count
from ..messages.outcomes import Fault, Outcome, RequestError
from ..messages.usage_record import UsageRecord


class RequestAccount(ABC):
    def __init__(self, opened: OpenAccount, received_unix_s: float) -> None:
        """`received_unix_s` is when it was received, in Unix seconds; all other times are on the process's clock."""
        self.request_id = opened.request_id
        self.received_at = opened.received_at
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.engine_id: int | None = None
        """The engine of the first admission, or the upstream..."""
        self.incarnation: int | None = None
        """...and which of its processes that was."""
        self.error: RequestError | None = None
        self.fault: Fault | None = None
        self._opened = opened
        self._unix_offset_s = received_unix_s - opened.received_at

    def withdraw(self) -> None:
        """Treat the request as never admitted, since the journal had no room for its record."""
        self.admitted_at = self.first_token_at = self.engine_id = self.incarnation = None

    @property
    @abstractmethod
    def cached(self) -> Count: ...

    @property
    @abstractmethod
    def router_estimate(self) -> int | None:
        """The cached tokens that a router expected; None if no router said so."""

    @property
    @abstractmethod
    def outcome(self) -> Outcome:
        """The request's outcome if it ended now."""

    @abstractmethod
    def problems(self) -> list[str]:
        """Describe what does not add up or cannot be; empty for a balanced account."""

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """Return the fields of the record that not every account has."""

    def record(self, now: float) -> UsageRecord:
        """Return the record as it is if the request ends at `now`."""
        opened, caller, unix = self._opened, self._opened.caller, self._unix_offset_s
        return UsageRecord(
            request_id=opened.request_id,
            client_request_id=caller.client_request_id,
            idempotency_key=caller.idempotency_key,
            idempotency_digest=caller.idempotency_digest,
            tenant=caller.tenant,
            key_id=caller.key_id,
            model=caller.model,
            endpoint=opened.endpoint,
            received_at=opened.received_at + unix,
            admitted_at=None if self.admitted_at is None else self.admitted_at + unix,
            first_token_at=None if self.first_token_at is None else self.first_token_at + unix,
            closed_at=now + unix,
            outcome=self.outcome,
            cached=self.cached,
            disputed=bool(self.problems()),
            engine=self.engine_id,
            incarnation=self.incarnation,
            router_estimate=self.router_estimate,
            seed=opened.seed,
            fault=self.fault,
            **self.numbers(),
        )
