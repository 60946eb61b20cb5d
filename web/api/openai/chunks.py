"""The chunks of a stream of completions or chat, which differ in the form of a choice.

What must always hold: everything but text, choice and usage is encoded once, in advance; a chunk costs no more than
joining bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import orjson

from quipu.actors.messages.handler import Closed, Delta, OfPrompt, OutletEvent, ScoredDelta, Started
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.scores import TokenScores

from ...http.sse import DONE, json_for_line
from ...request.errors import APIError, error_of
from ..content import CallIds
from ..generation import GenerationRequest, WantedScores
from ..stream import Stream, StreamWriter
from ..usage import openai_usage, tallied_usage

MAX_IDS = 1 << 14
"""Token ids encoded in one piece: well under a millisecond of work."""


@attrs.frozen
class Envelope:
    id: str
    created: int
    """Unix seconds."""
    model: str

    def fields(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


_NO_LOGPROBS = b',"logprobs":null'
TOOL_CALLS, FUNCTION_CALL = "tool_calls", "function_call"
"""Finish reasons of chat, for a choice that stopped after a call."""
_FINISH: dict[str | None, bytes] = {
    reason: _NO_LOGPROBS + b',"finish_reason":' + orjson.dumps(reason)
    for reason in (None, *FinishReason, TOOL_CALLS, FUNCTION_CALL)
}
_CHOICE_END = b"}]"
"""The end of a choice, and of the list of choices."""
_RUNNING = _FINISH[None] + _CHOICE_END


def stop_fields(match: str | None, token_id: int | None, wanted: GenerationRequest) -> bytes:
    """Return what ended a choice, as vLLM says it, which leaves out the model's own end tokens, and as SGLang does.

    Nothing if nothing did: OpenAI's API has no such fields.
    """
    if match is None and token_id is None:
        return b""
    asked_for = token_id if token_id in wanted.sampling.stop_token_ids else None
    found = (asked_for, token_id) if match is None else (match, match)
    return b',"stop_reason":%b,"matched_stop":%b' % tuple(map(orjson.dumps, found))


class ChunkWriter(StreamWriter):
    OBJECT_NAME: str

    def __init__(self, stream: Stream, envelope: Envelope, wanted: GenerationRequest, call_ids: CallIds) -> None:
        super().__init__(stream)
        self._delivery = wanted.delivery
        self._wanted = wanted
        self._call_ids = call_ids
        self._num_top = wanted.scores.output
        self._shows_every_token = self._num_top is not None or wanted.with_token_ids
        """Tokens without text have chunks, too."""
        head = b"data: " + orjson.dumps(envelope.fields(self.OBJECT_NAME))[:-1]
        self._choice_head = head + b',"choices":[{"index":'
        self._no_choice_head = head + b',"choices":[]'
        self._plain_end = b',"usage":null}\n\n' if wanted.delivery.include_usage else b"}\n\n"
        self._running_tail = _RUNNING + self._plain_end

    @abstractmethod
    def render(self, delta: Delta) -> bytes:
        """Return the chunks of a delta that has a text, events, a finish reason, logprobs or token ids."""

    @abstractmethod
    def scores(self, delta: ScoredDelta, wanted: WantedScores) -> dict[str, Any] | None:
        """Return the logprobs of the delta's output tokens, if it has any."""

    def prompt(self, delta: ScoredDelta, scores: TokenScores) -> Iterator[bytes]:
        """Yield the chunks of an echoed prompt, each made as the client reads."""
        return iter(())

    @abstractmethod
    def prompt_ids(self, index: int, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Yield a chunk with the ids of a choice's prompt, in pieces."""

    @staticmethod
    def with_logprobs(tail: bytes, told: dict[str, Any]) -> bytes:
        """Return the rest of a chunk after the text, with logprobs."""
        return b',"logprobs":' + json_for_line(told) + tail[len(_NO_LOGPROBS) :]

    def _consume_one(self, event: OutletEvent) -> None:
        match event:
            case ScoredDelta() if event.of_prompt is not None:
                self._push_prompt(event, event.of_prompt)
            case Delta():
                if event.text or event.finish_reason is not None or event.events or self._shows_every_token:
                    self._sink.push(self.render(event))
                else:
                    self._tally.add(event)
            case Started():
                self._tally.start(event)
            case Closed():
                self._close(event)

    def _push_prompt(self, delta: ScoredDelta, prompt: OfPrompt) -> None:
        if prompt.token_ids is not None:
            self._push_slowly(self.prompt_ids(delta.index, prompt.token_ids))
        if prompt.scores is not None:
            self._push_slowly(self.prompt(delta, prompt.scores))
        elif delta.num_tokens or delta.finish_reason is not None:
            self._sink.push(self.render(delta))
            return
        self._tally.add(delta)

    def _close(self, closed: Closed) -> None:
        error = error_of(closed)
        if error is not None:
            self._fail(error)
            return
        if not self._delivery.include_usage:
            self._end(DONE)
            return
        usage = openai_usage(
            closed.record, with_tiers=self._delivery.with_tiers, image_tokens=self._wanted.image_tokens
        )
        self._end(self._no_choice_head + b',"usage":' + orjson.dumps(usage) + b"}\n\n" + DONE)

    def _fail(self, error: APIError) -> None:
        # Clients stop reading at [DONE], even after an error.
        self._end(b"data: " + error.body() + b"\n\n" + DONE)

    def _told_tail(self, delta: Delta, finish_reason: str | None) -> bytes:
        """Return `_tail` with the logprobs and token ids that the client asked for."""
        tail = self._tail() if finish_reason is None else self._last_tail(delta, finish_reason)
        if self._num_top is not None and isinstance(delta, ScoredDelta):
            told = self.scores(delta, self._wanted.scores)
            tail = tail if told is None else self.with_logprobs(tail, told)
        return b',"token_ids":' + orjson.dumps(delta.token_ids) + tail if self._wanted.with_token_ids else tail

    def _last_tail(self, delta: Delta, finish_reason: str) -> bytes:
        """Return the rest of a choice's last chunk: with its finish reason, and what it was that ended it."""
        stop = stop_fields(delta.stop_match, delta.stop_token_id, self._wanted)
        return self._tail(_FINISH[finish_reason] + stop + _CHOICE_END)

    def _tail(self, end: bytes | None = None) -> bytes:
        """Return the rest of a chunk after the text, with the usage so far if it was requested.

        `end` is that of the choice; None: it goes on.
        """
        if not self._delivery.continuous_usage:
            # The hot path: nearly every chunk ends like this.
            return self._running_tail if end is None else end + self._plain_end
        usage = tallied_usage(self._tally, with_tiers=self._delivery.with_tiers, image_tokens=self._wanted.image_tokens)
        return b"".join((_RUNNING if end is None else end, b',"usage":', orjson.dumps(usage), b"}\n\n"))


def id_pieces(token_ids: Sequence[int]) -> Iterator[bytes]:
    """Yield a JSON array of token ids, of which there may be a hundred thousand, for `return_token_ids`."""
    yield b"["
    for start in range(0, len(token_ids), MAX_IDS):
        yield (b"," if start else b"") + orjson.dumps(list(token_ids[start : start + MAX_IDS]))[1:-1]
    yield b"]"
