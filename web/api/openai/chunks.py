"""The chunks of a stream of completions or chat.

Each endpoint supplies its own form of a choice (`completions.py`, `chat.py`). What must always hold: everything but
text, choice and usage is encoded once, in advance; a chunk costs no more than joining bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import attrs
import orjson
import structlog

from quipu.actors.messages.handler import Closed, Delta, OutletEvent, ScoredDelta, Started
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.scores import TokenScores

from ...http.sse import DONE, Sink, json_for_line
from ...request.errors import APIError, error_of
from ...request.tally import Tally
from ..generation import WantedScores
from ..stream import StreamWriter
from ..usage import openai_usage, tallied_usage
from .common_fields import Delivery


@attrs.frozen
class Envelope:
    """The fields that all chunks of a response share."""

    id: str
    created: int
    """Unix seconds."""
    model: str

    def fields(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


_NO_LOGPROBS = b',"logprobs":null'
_FINISH: dict[FinishReason | None, bytes] = {
    reason: _NO_LOGPROBS + b',"finish_reason":' + orjson.dumps(reason) + b"}]" for reason in (None, *FinishReason)
}
"""The end of a choice, and of the list of choices."""


class ChunkWriter(StreamWriter):
    """Encodes a stream's chunks into its sink."""

    OBJECT_NAME: str

    def __init__(
        self,
        sink: Sink,
        envelope: Envelope,
        delivery: Delivery,
        scores: WantedScores,
        tally: Tally,
        log: structlog.typing.BindableLogger,
    ) -> None:
        super().__init__(sink, tally, log)
        self._delivery = delivery
        self._num_top = scores.output
        head = b"data: " + orjson.dumps(envelope.fields(self.OBJECT_NAME))[:-1]
        self._choice_head = head + b',"choices":[{"index":'
        self._no_choice_head = head + b',"choices":[]'
        self._plain_end = b',"usage":null}\n\n' if delivery.include_usage else b"}\n\n"
        self._running_tail = _FINISH[None] + self._plain_end

    @abstractmethod
    def render(self, delta: Delta) -> bytes:
        """Return the chunks of a delta that has a text, a finish reason or logprobs."""

    @abstractmethod
    def scores(self, delta: ScoredDelta, num_top: int) -> dict[str, Any] | None:
        """Return the logprobs of the delta's output tokens, if it has any."""

    def prompt(self, delta: ScoredDelta, scores: TokenScores) -> Iterator[bytes]:
        """Yield the chunks of an echoed prompt, each made as the client reads. None by default."""
        return iter(())

    @staticmethod
    def with_logprobs(tail: bytes, told: dict[str, Any]) -> bytes:
        """Return the rest of a chunk after the text, with logprobs."""
        return b',"logprobs":' + json_for_line(told) + tail[len(_NO_LOGPROBS) :]

    def _consume_one(self, event: OutletEvent) -> None:
        match event:
            case ScoredDelta() if event.prompt_scores is not None:
                self._tally.add(event)
                self._push_slowly(self.prompt(event, event.prompt_scores))
            case Delta():
                if event.text or event.finish_reason is not None or self._num_top is not None:
                    self._sink.push(self.render(event))
                else:
                    self._tally.add(event)
            case Started():
                self._tally.start(event)
            case Closed():
                self._close(event)

    def _close(self, closed: Closed) -> None:
        error = error_of(closed)
        if error is not None:
            self._end(self._failure(error))
            return
        if not self._delivery.include_usage:
            self._end(DONE)
            return
        usage = openai_usage(closed.record, with_tiers=self._delivery.with_tiers)
        self._end(self._no_choice_head + b',"usage":' + orjson.dumps(usage) + b"}\n\n" + DONE)

    def _failure(self, error: APIError) -> bytes:
        # Clients stop reading at [DONE], even after an error.
        return b"data: " + error.body() + b"\n\n" + DONE

    def _scored_tail(self, delta: Delta, num_top: int, finish_reason: FinishReason | None) -> bytes:
        """Return `_tail` with the delta's logprobs."""
        told = self.scores(delta, num_top) if isinstance(delta, ScoredDelta) else None
        tail = self._tail(finish_reason)
        return tail if told is None else self.with_logprobs(tail, told)

    def _tail(self, finish_reason: FinishReason | None) -> bytes:
        """Return the rest of a chunk after the text, with the usage so far if it was requested."""
        if not self._delivery.continuous_usage:
            # The hot path: nearly every chunk ends like this.
            return self._running_tail if finish_reason is None else _FINISH[finish_reason] + self._plain_end
        usage = tallied_usage(self._tally, with_tiers=self._delivery.with_tiers)
        return b"".join((_FINISH[finish_reason], b',"usage":', orjson.dumps(usage), b"}\n\n"))
