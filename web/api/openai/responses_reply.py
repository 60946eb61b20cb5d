"""How the response of one request is formatted: whole, as a stream, and as it is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import attrs

from quipu.actors.messages.handler import Closed
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.usage_record import UsageRecord

from ...request.errors import APIError, error_of
from ...request.tally import Tally
from ..answer import Reply
from ..content import CallIds
from ..stream import Stream, Transcript
from ..text_scores import TextScores
from .responses import ResponseRequest
from .responses_body import ResponseVersions, with_items
from .responses_items import OutputItems
from .responses_logprobs import Logprobs
from .responses_stream import ResponseWriter


@attrs.frozen
class FinalVersion:
    """The last version of a response, with its items apart."""

    body: dict[str, Any]
    items: Iterator[dict[str, Any]]
    logprobs: Logprobs | None = None
    """Of the texts of its items, which are without them."""


class ResponseReply(Reply):
    def __init__(self, asked_for: ResponseRequest, call_ids: CallIds) -> None:
        super().__init__(asked_for.wanted, f"resp_{call_ids.request_id}")
        self.created_at = int(time.time())
        self._echo = dict(asked_for.echo)
        self._call_ids = call_ids

    def mark_unstored(self) -> None:
        """Say from now on that the response is not stored."""
        self._echo["store"] = False

    def transcript(self, tally: Tally) -> Transcript:
        return Transcript(tally, self.wanted.include_reasoning, text_scores=self._text_scores())

    def _text_scores(self) -> TextScores | None:
        wanted = self.wanted
        if wanted.scores.output is None:
            return None
        return TextScores(with_reasoning=wanted.include_reasoning, with_stop=wanted.include_stop)

    def pieces(self, transcript: Transcript, record: UsageRecord) -> Iterator[bytes]:
        logprobs = self._logprobs(transcript.text_scores)
        final = self._served(transcript, record, logprobs)
        pieces = with_items(final.body, final.items)
        return pieces if logprobs is None else logprobs.fill(pieces)

    def writer(self, stream: Stream) -> ResponseWriter:
        return ResponseWriter(stream, self.versions(), self._scored_items())

    def log_writer(self, stream: Stream) -> ResponseWriter:
        """Return a writer that leaves holes for logprobs, which are filled when the events are read."""
        return ResponseWriter(stream, self.versions(), self._scored_items(), leaves_holes=True)

    def _scored_items(self) -> OutputItems:
        return self.output_items(self._logprobs(self._text_scores()))

    def final(
        self, transcript: Transcript, closed: Closed, *, is_cancelled: bool = False, error: APIError | None = None
    ) -> FinalVersion:
        """Return the last version, however the request has ended. `error`: why, if the request does not say."""
        logprobs = self._logprobs(transcript.text_scores)
        error = error_of(closed) if error is None else error
        if error is None:
            return attrs.evolve(self._served(transcript, closed.record), logprobs=logprobs)
        versions, content = self.versions(), transcript.content(0)
        body = versions.cancelled(closed.record) if is_cancelled else versions.failed(error, closed.record)
        items = self.output_items().output(content, is_whole=False) if content.blocks else iter(())
        return FinalVersion(body, items, logprobs)

    def _served(self, transcript: Transcript, record: UsageRecord, logprobs: Logprobs | None = None) -> FinalVersion:
        is_cut = transcript.finish_reasons.get(0) is FinishReason.LENGTH and not self.wanted.is_prewarm
        body = self.versions().served(record, is_cut=is_cut)
        if self.wanted.is_prewarm:
            return FinalVersion(body, iter(()))
        return FinalVersion(body, self.output_items(logprobs).output(transcript.content(0), is_whole=not is_cut))

    def versions(self) -> ResponseVersions:
        return ResponseVersions(self.answer_id, self.created_at, self._echo, self.wanted)

    def output_items(self, logprobs: Logprobs | None = None) -> OutputItems:
        return OutputItems(self._call_ids, self.wanted.rules, logprobs)

    def _logprobs(self, scores: TextScores | None) -> Logprobs | None:
        return None if scores is None else Logprobs(self.wanted.scores.output or 0, scores)
