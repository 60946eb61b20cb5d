"""Requests whose accounts are closed, and whose clients wait until their records are written.

Part of the entry store. What must always hold: a client is told of success only once its record is written; at its
deadline it is told of an error; the record stays as it is.
"""

from __future__ import annotations

import attrs

from ..messages.accountant import OpenAccount, Refused
from ..messages.handler import Closed
from ..messages.outcomes import ErrorKind


@attrs.frozen(eq=False)
class FiledRequests:
    _waiting: dict[str, tuple[OpenAccount, Closed]] = attrs.field(factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, opened: OpenAccount, closed: Closed) -> None:
        self._waiting[opened.request_id] = opened, closed

    def release(self, request_id: str) -> None:
        """Let the client see the end. Raises what its outlet raises."""
        opened, closed = self._waiting.pop(request_id)
        opened.outlet.put(closed)

    def answer_late(self, refused: Refused) -> None:
        """Tell a client whose deadline has passed, or why its request has failed.

        Not that of a line of a batch, whose answer may be kept by now.
        """
        if refused.error.kind is not ErrorKind.TIMEOUT or refused.request_id not in self._waiting:
            return
        opened, closed = self._waiting[refused.request_id]
        if opened.keep is None:
            opened.outlet.put(Closed(closed.record, closed.error or refused.error, is_final=False))
