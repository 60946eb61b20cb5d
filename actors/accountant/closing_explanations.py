"""Explains requests when they close, for `GET /v1/cache/explain`: one prompt at a time if there are many.

Used by the accountant. What must always hold: an error in an explanation does not affect the account.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..messages.explanations import ExplainedPrompt
from ..messages.usage_record import UsageRecord
from ..request_desk.desk import RequestDesk
from .account import Account
from .entry_store import EntryStore
from .explaining import explain_prompts, explain_request, explanation_of
from .request_entries import RequestEntries


class ClosingExplanations:
    def __init__(self, store: EntryStore, desk: RequestDesk, log: Any) -> None:
        """`log` is the actor's structlog logger: this module has none."""
        self._store = store
        self._desk = desk
        self._log = log
        self._prepared: dict[str, list[ExplainedPrompt]] = {}
        """By request that is about to close."""

    def prepare(self, request: RequestEntries) -> Iterator[None]:
        """Explain the prompts of a request that is about to close, if it has many; yield after each."""
        if not request.is_divided or request.applied.is_filed or not request.may_close:
            return
        prompts = self._prepared[request.request_id] = []
        try:
            account = request.account()
            num_blocks = self._desk.num_usable_blocks_of(account.engine_id or 0)
            for prompt in explain_prompts(request, account, self._store.explanations.name_of, num_blocks):
                prompts.append(prompt)
                yield
        except Exception:
            self._log.exception("explanation.failed")

    def keep(self, request: RequestEntries, account: Account, record: UsageRecord) -> None:
        """Keep the explanation of a request."""
        explanations = self._store.explanations
        try:
            prepared = self._prepared.pop(request.request_id, None)
            if prepared is None or request.applied.is_withdrawn:  # perhaps since they were prepared
                num_blocks = self._desk.num_usable_blocks_of(record.engine or 0)
                explained = explain_request(request, account, record, explanations.name_of, num_blocks, is_open=False)
            else:
                explained = explanation_of(record, prepared, is_open=False)
            explanations.keep(explained)
        except Exception:
            self._log.exception("explanation.failed")
