"""The answer of `POST /generate`: an object for each choice, and its stream, whose events repeat all text so far.

    {"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens"}}

What must always hold: numbers of a prompt are those of its account, in each of its choices; an event of a long answer
costs no more than a bounded number of bytes for each of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import attrs
import orjson

from quipu.actors.messages.handler import Delta, ScoredDelta
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.scores import LikelyToken, ScoredToken, TokenScores
from quipu.actors.messages.usage_record import UsageRecord

from ...http.sse import DONE, json_for_line
from ...request.errors import APIError
from ...request.tally import Tally
from ..answer import Reply
from ..generation import GenerationRequest
from ..openai.chunks import id_pieces
from ..openai.logprobs import array_pieces, finite
from ..stream import AnswerWriter, Stream, StreamWriter, Transcript
from ..translated_body import with_foreign
from .generate_body import REQUEST, Wishes

BYTES_A_TOKEN: Final = 1 << 14
"""Of a stream: with longer events, several tokens share one, since each event repeats all text so far."""


class GenerateReply(Reply):
    declared = with_foreign(REQUEST)

    def __init__(self, wanted: GenerationRequest, request_id: str, wishes: Wishes) -> None:
        super().__init__(wanted, request_id)
        self.wishes = wishes

    def pieces(self, transcript: Transcript, record: UsageRecord) -> Iterator[bytes]:
        if self.wishes.is_list:
            yield b"["
        for index in range(self.wanted.num_sequences):
            yield b',{"text":' if index else b'{"text":'
            yield orjson.dumps(transcript.content(index).text)
            yield b',"output_ids":'
            token_ids = transcript.token_ids.get(index, ())
            yield from id_pieces(token_ids)
            ended = self._ended(transcript, index, len(token_ids))
            meta = {**self.meta_info(transcript.tally, index, ended), "completion_tokens": len(token_ids)}
            meta["e2e_latency"] = record.closed_at - record.received_at
            yield b',"meta_info":' + orjson.dumps(meta)[:-1]
            yield from self._logprobs(transcript, index)
            yield b"}"
            if self.wishes.with_prompt_ids:
                yield b',"prompt_token_ids":'
                yield from id_pieces(transcript.of_prompt(index).token_ids or ())
            yield b"}"
        if self.wishes.is_list:
            yield b"]"

    @staticmethod
    def _ended(transcript: Transcript, index: int, num_tokens: int) -> dict[str, Any]:
        found = transcript.finish_reasons.get(index)
        return finish_reason(
            found, transcript.stop_matches.get(index), transcript.stop_token_ids.get(index), num_tokens
        )

    def meta_info(self, tally: Tally, index: int, ended: dict[str, Any] | None) -> dict[str, Any]:
        """Return what is said of every choice, but for its tokens and logprobs."""
        numbers = tally.of_prompt(index // self.wanted.num_choices)
        return {
            "id": self.answer_id if self.wanted.num_sequences == 1 else f"{self.answer_id}_{index}",
            "finish_reason": ended,
            "prompt_tokens": None if numbers is None else numbers.num_tokens,
            "cached_tokens": None if numbers is None else numbers.num_cached,
        }

    def _logprobs(self, transcript: Transcript, index: int) -> Iterator[bytes]:
        num_top, start = self.wanted.scores.output, self.wishes.logprob_start
        if num_top is None:
            return
        prompt, outputs, heads = transcript.of_prompt(index), transcript.scores.get(index), dict[bytes, bytes]()
        scored = [] if start is None or prompt.scores is None else [prompt.scores]
        shown = range(start or 0, max(start or 0, *map(len, scored), 0))
        if start is not None and prompt.token_ids is not None and start < len(prompt.token_ids):
            first = self._first(prompt.token_ids[start], start, prompt.scores)
            heads = {b"token_logprobs": orjson.dumps(first), b"top_logprobs": b"null"}
        for name, describe in self.logprob_fields(num_top):
            yield b',"input_%b":' % name
            yield from array_pieces(scored, num_top, describe, first=heads.get(name, b""), tokens=shown)
            yield b',"output_%b":' % name
            yield from array_pieces([] if outputs is None else [outputs], num_top, describe)

    def _first(self, token_id: int, at: int, scores: TokenScores | None) -> list[Any]:
        """Return the entry of the token with which logprobs of the prompt begin, which itself has none."""
        text = None
        if self.wishes.with_text and scores is not None and 0 < at <= len(scores):
            text = next(iter(scores.tokens(at - 1, at, 0))).text
        return [None, token_id, text]

    def logprob_fields(self, num_top: int) -> Iterable[tuple[bytes, Callable[[ScoredToken], Any]]]:
        """Return the lists of logprobs, by the ends of their names: how each entry is made of a token."""
        yield b"token_logprobs", self._entry
        if num_top:
            yield b"top_logprobs", lambda token: [self._entry(other) for other in token.top[:num_top]]

    def _entry(self, token: ScoredToken | LikelyToken) -> list[Any]:
        return [finite(token.logprob), token.token_id, token.text if self.wishes.with_text else None]

    def writer(self, stream: Stream) -> StreamWriter:
        return GenerateWriter(stream, self)


def finish_reason(
    found: FinishReason | None, match: str | None, token_id: int | None, num_tokens: int
) -> dict[str, Any]:
    """Return how a choice ended, as SGLang says it."""
    if found is FinishReason.STOP:
        return {"type": "stop", "matched": token_id if match is None else match}
    return {"type": "length", "length": num_tokens}


@attrs.define
class _Choice:
    """What a choice's next event repeats, as JSON."""

    text: bytearray = attrs.field(factory=bytearray)
    token_ids: bytearray = attrs.field(factory=bytearray)
    logprobs: dict[bytes, bytearray] = attrs.field(factory=dict)
    num_tokens: int = 0
    num_unsent: int = 0
    """Tokens since the last event."""

    def num_bytes(self) -> int:
        return len(self.text) + len(self.token_ids) + sum(map(len, self.logprobs.values()))


class GenerateWriter(AnswerWriter):
    def __init__(self, stream: Stream, reply: GenerateReply) -> None:
        super().__init__(stream)
        self._reply = reply
        self._num_top = reply.wanted.scores.output
        self._choices: dict[int, _Choice] = {}

    def _add(self, delta: Delta) -> None:
        choice = self._choices.setdefault(delta.index, _Choice())
        choice.text += json_for_line(delta.text)[1:-1]
        _extend(choice.token_ids, delta.token_ids)
        choice.num_tokens += delta.num_tokens
        choice.num_unsent += delta.num_tokens
        if self._num_top is not None and isinstance(delta, ScoredDelta) and delta.scores:
            for name, describe in self._reply.logprob_fields(self._num_top):
                _extend(choice.logprobs.setdefault(name, bytearray()), tuple(map(describe, delta.scores)))
        has_ended = delta.finish_reason is not None
        if has_ended or choice.num_bytes() < choice.num_unsent * BYTES_A_TOKEN:
            ended = None
            if has_ended:
                ended = finish_reason(delta.finish_reason, delta.stop_match, delta.stop_token_id, choice.num_tokens)
            choice.num_unsent = 0
            self._sink.push(self._event(delta.index, choice, ended))

    def _event(self, index: int, choice: _Choice, ended: dict[str, Any] | None) -> bytes:
        meta = {**self._reply.meta_info(self._tally, index, ended), "completion_tokens": choice.num_tokens}
        parts: list[bytes | bytearray] = [
            b'data: {"text":"',
            choice.text,
            b'","output_ids":[',
            choice.token_ids,
            b'],"meta_info":',
        ]
        parts.append(json_for_line(meta)[:-1])
        if self._num_top is not None:
            parts.append(b',"input_token_logprobs":[]')
            for name, _ in self._reply.logprob_fields(self._num_top):
                parts += (b',"output_%b":[' % name, choice.logprobs.get(name, b""), b"]")
        tail = b'},"index":%d}\n\n' % index if self._reply.wishes.is_list else b"}}\n\n"
        return b"".join((*parts, tail))

    def _last(self, record: UsageRecord) -> bytes:
        return DONE

    def _fail(self, error: APIError) -> None:
        self._end(b"data: " + error.body() + b"\n\n" + DONE)


def _extend(array: bytearray, values: tuple[Any, ...]) -> None:
    """Add values to the inside of a JSON array."""
    if values:
        if array:
            array += b","
        array += json_for_line(values)[1:-1]
