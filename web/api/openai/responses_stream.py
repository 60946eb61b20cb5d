"""The events of a streamed response, in their order:

    response.created, response.in_progress
    the events of each output item (`responses_item_events.py`)
    response.completed | response.incomplete

A request that fails midway ends with `error` and `response.failed` instead: clients raise on the former, and find the
usage in the latter. There is no `[DONE]`.

What must always hold: only the last event has usage; it contains the items as they were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from quipu.actors.messages.handler import Closed, Delta, OutletEvent, Started
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.usage_record import UsageRecord

from ...request.errors import APIError, error_of
from ..content import shown_events
from ..stream import Stream, StreamWriter
from .responses_body import ResponseVersions, with_items
from .responses_item_events import ItemWriter, NumberedEvents
from .responses_items import OutputItems
from .responses_logprobs import Fill

MAX_ITEMS_AT_ONCE = 64
"""In the last event; with more items, it is made while the client reads."""


class ResponseWriter(StreamWriter):
    def __init__(
        self, stream: Stream, versions: ResponseVersions, items: OutputItems, *, leaves_holes: bool = False
    ) -> None:
        """`leaves_holes`: logprobs are not filled in before events are pushed, but with `fill` when they are read."""
        super().__init__(stream)
        self._versions = versions
        self._wanted = versions.wanted
        self._output_items = items
        self._logprobs = items.logprobs
        self._filler = None if leaves_holes else items.logprobs
        self._events = NumberedEvents()
        self._items = ItemWriter(self._events, items)
        self._finish_reason: FinishReason | None = None
        self._record: UsageRecord | None = None

    @property
    def fill(self) -> Fill | None:
        """What fills in logprobs; None: there are none."""
        return None if self._logprobs is None else self._logprobs.fill

    def _consume_one(self, event: OutletEvent) -> None:
        match event:
            case Delta():
                self._tally.add(event)
                opening = b"" if self._events.num_events else self._opening()
                if self._logprobs is not None:
                    self._logprobs.scores.add(event)
                told = self._items.text(event.text) if event.text else self._shown(event)
                self._push(opening + told if opening else told)
                if event.finish_reason is not None:
                    self._finish_reason = event.finish_reason
            case Started():
                self._tally.start(event)
                self._sink.push(self._opening())
            case Closed():
                self._record = event.record
                error = error_of(event)
                if error is None:
                    self._finish(*self._closing(event.record))
                else:
                    self._fail(error)

    def write_failure(self, error: APIError, record: UsageRecord) -> None:
        """End with an error that is not the request's own."""
        self._record = record
        self._fail(error)

    def write_cancelled(self, record: UsageRecord) -> None:
        """End as cancelled by the client. The API has no event of that name."""
        first = self._opening() + self._items.end(is_whole=False)
        self._finish(first, self._last("response.incomplete", self._versions.cancelled(record), is_whole=False))

    def _shown(self, delta: Delta) -> bytes:
        shown = shown_events(delta.events, with_reasoning=self._wanted.include_reasoning)
        return b"".join(map(self._items.show, shown))

    def _opening(self) -> bytes:
        """Return the first events, unless they have been sent."""
        if self._events.num_events:
            return b""
        response, event = self._versions.body("in_progress"), self._events.event
        return event("response.created", response=response) + event("response.in_progress", response=response)

    def _finish(self, first: bytes, last: Iterator[bytes]) -> None:
        """Push the last events, the very last of which is made in pieces."""
        if len(self._items.content.blocks) > MAX_ITEMS_AT_ONCE or self._filler is not None:
            self._push(first)
            self._push_slowly(self._filled(last))
            self._sink.finish()
        else:
            self._end(first + b"".join(last))

    def _push(self, data: bytes) -> None:
        if self._filler is None:
            self._sink.push(data)
        elif self._filler.is_small(data):
            self._sink.push(b"".join(self._filler.fill((data,))))
        else:
            self._push_slowly(self._filler.fill((data,)))

    def _filled(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        return iter(pieces) if self._filler is None else self._filler.fill(pieces)

    def _closing(self, record: UsageRecord) -> tuple[bytes, Iterator[bytes]]:
        is_cut = self._finish_reason is FinishReason.LENGTH and not self._wanted.is_prewarm
        first = self._opening() + (b"" if self._wanted.is_prewarm else self._items.end(is_whole=not is_cut))
        name = "response.incomplete" if is_cut else "response.completed"
        return first, self._last(name, self._versions.served(record, is_cut=is_cut), is_whole=not is_cut)

    def _failing(self, error: APIError) -> tuple[bytes, Iterator[bytes]]:
        told = {"type": error.error_type, "code": error.code, "message": error.message, "param": error.param}
        known = self._tally if self._record is None else self._record
        # The client's type has the fields of an `error` event at its top level, but it raises on a nested object.
        first = self._opening() + self._events.event("error", **{**told, "type": "error"}, error=told)
        return first, self._last("response.failed", self._versions.failed(error, known), is_whole=False)

    def _fail(self, error: APIError) -> None:
        self._finish(*self._failing(error))

    def _last(self, name: str, response: dict[str, Any], *, is_whole: bool) -> Iterator[bytes]:
        content = self._items.content
        items = self._output_items.output(content, is_whole=is_whole) if content.blocks else ()
        return self._events.response_event(name, with_items(response, items))
