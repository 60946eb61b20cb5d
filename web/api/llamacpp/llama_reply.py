"""The answer of `POST /completion` and `/infill`: an object for each choice, and its stream of events, whose last one
has no text.

What must always hold: `tokens_evaluated` and `tokens_cached` are those of the choice's prompt in the request's account;
`timings` are the request's, from the record, so an event that ends a choice is sent when all have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import orjson

from quipu.actors.messages.handler import Delta, ScoredDelta
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.sampling import LogitRules
from quipu.actors.messages.scores import LikelyToken, ScoredToken
from quipu.actors.messages.usage_record import UsageRecord

from ...http.sse import json_for_line
from ...request.errors import APIError
from ...request.tally import Tally
from ..answer import Reply
from ..openai.chunks import id_pieces
from ..openai.logprobs import array_pieces, finite
from ..stream import AnswerWriter, Stream, StreamWriter, Transcript
from ..translated_body import with_foreign
from .llama_body import SAMPLING, UNLIMITED, LlamaRequest

_MS = 1000.0


@attrs.define
class Ended:
    """How a choice ended."""

    reason: FinishReason | None = None
    match: str | None = None
    num_tokens: int = 0
    has_new_line: bool = False


class LlamaReply(Reply):
    def __init__(self, request: LlamaRequest, request_id: str, max_model_len: int) -> None:
        super().__init__(request.wanted, request_id)
        self.declared = with_foreign(request.declared)
        self._shows_tokens = request.shows_tokens
        self._max_model_len = max_model_len

    def pieces(self, transcript: Transcript, record: UsageRecord) -> Iterator[bytes]:
        is_list, num_top = self.wanted.num_sequences > 1, self.wanted.scores.output
        if is_list:
            yield b"["
        for index in range(self.wanted.num_sequences):
            content, token_ids = transcript.content(index).text, transcript.token_ids.get(index, ())
            yield b',{"content":' if index else b'{"content":'
            yield orjson.dumps(content)
            yield b',"tokens":'
            yield from id_pieces(token_ids if self._shows_tokens else ())
            if num_top is not None:
                scores = transcript.scores.get(index)
                yield b',"completion_probabilities":'
                yield from array_pieces([] if scores is None else [scores], num_top, self.probabilities)
            reason, match = transcript.finish_reasons.get(index), transcript.stop_matches.get(index)
            ended = Ended(reason, match, len(token_ids), "\n" in content)
            yield b"," + orjson.dumps(self.last_fields(transcript.tally, index, ended, record))[1:]
        if is_list:
            yield b"]"

    def probabilities(self, token: ScoredToken) -> dict[str, Any]:
        top = token.top[: self.wanted.scores.output]
        return {**_likely(token), "top_logprobs": [_likely(other) for other in top]}

    def last_fields(self, tally: Tally, index: int, ended: Ended, record: UsageRecord) -> dict[str, Any]:
        """Return what is said of a choice at its end, but for its output."""
        numbers = tally.of_prompt(index // self.wanted.num_choices)
        evaluated = None if numbers is None else numbers.num_tokens
        cached = None if numbers is None else numbers.num_cached
        is_limit, length = ended.reason is FinishReason.LENGTH, (evaluated or 0) + ended.num_tokens
        stopped = "limit" if is_limit else ("eos" if ended.match is None else "word")
        return {
            "index": index,
            "id_slot": UNLIMITED,
            "stop": True,
            "model": self.wanted.model,
            "tokens_predicted": ended.num_tokens,
            "tokens_evaluated": evaluated,
            "generation_settings": self._settings(),
            "has_new_line": ended.has_new_line,
            "truncated": is_limit and length >= self._max_model_len,
            "stop_type": stopped,
            "stopping_word": ended.match or "",
            "tokens_cached": cached,
            "timings": _timings(record, evaluated, cached, ended.num_tokens),
        }

    def _settings(self) -> dict[str, Any]:
        wanted = self.wanted
        limit = UNLIMITED if wanted.max_tokens is None else wanted.max_tokens
        given = {"n_predict": limit, "max_tokens": limit, "n_ctx": self._max_model_len, "stop": wanted.stop}
        given |= {"stream": wanted.delivery.stream, "n_probs": wanted.scores.output or 0}
        sampling, rules = wanted.sampling, wanted.sampling.rules or LogitRules()
        drawn = {
            name: getattr(sampling if hasattr(sampling, completion) else rules, completion)
            for name, (completion, _) in SAMPLING.items()
            if hasattr(sampling, completion) or hasattr(rules, completion)
        }
        drawn.pop("grammar", None)
        return given | drawn

    def writer(self, stream: Stream) -> StreamWriter:
        return LlamaWriter(stream, self)


def _likely(token: ScoredToken | LikelyToken) -> dict[str, Any]:
    return {"id": token.token_id, "token": token.text, "bytes": list(token.utf8), "logprob": finite(token.logprob)}


def _timings(record: UsageRecord, evaluated: int | None, cached: int | None, num_predicted: int) -> dict[str, Any]:
    """Return how long the prompts of a request and its output took, and what that is for each token of a choice."""
    admitted, first = record.admitted_at, record.first_token_at
    prompt_s = 0.0 if admitted is None else max(0.0, (record.closed_at if first is None else first) - admitted)
    predicted_s = 0.0 if first is None else max(0.0, record.closed_at - first)
    num_computed = None if evaluated is None else evaluated - (cached or 0)
    return {
        "cache_n": cached,
        "prompt_n": num_computed,
        **_speed("prompt", num_computed or 0, prompt_s),
        "predicted_n": num_predicted,
        **_speed("predicted", num_predicted, predicted_s),
    }


def _speed(name: str, num_tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_ms": seconds * _MS,
        f"{name}_per_token_ms": seconds * _MS / num_tokens if num_tokens else 0.0,
        f"{name}_per_second": num_tokens / seconds if seconds else 0.0,
    }


class LlamaWriter(AnswerWriter):
    def __init__(self, stream: Stream, reply: LlamaReply) -> None:
        super().__init__(stream)
        self._reply = reply
        self._ends: dict[int, Ended] = {}

    def _add(self, delta: Delta) -> None:
        ended = self._ends.setdefault(delta.index, Ended())
        ended.num_tokens += delta.num_tokens
        ended.has_new_line = ended.has_new_line or "\n" in delta.text
        if delta.finish_reason is not None:
            ended.reason, ended.match = delta.finish_reason, delta.stop_match
        if not delta.num_tokens and not delta.text:
            return
        numbers = self._tally.of_prompt(delta.index // self._reply.wanted.num_choices)
        told: dict[str, Any] = {
            "index": delta.index,
            "content": delta.text,
            "tokens": delta.token_ids,
            "stop": False,
            "id_slot": UNLIMITED,
            "tokens_predicted": ended.num_tokens,
            "tokens_evaluated": None if numbers is None else numbers.num_tokens,
        }
        if self._reply.wanted.scores.output is not None and isinstance(delta, ScoredDelta):
            told["completion_probabilities"] = [self._reply.probabilities(token) for token in delta.scores]
        self._sink.push(_event(told))

    def _last(self, record: UsageRecord) -> bytes:
        # each repeats the settings of a request that may have hundreds of choices
        self._push_slowly(self._endings(record))
        return b""

    def _endings(self, record: UsageRecord) -> Iterator[bytes]:
        """Yield the event that ends each choice."""
        empty = {"content": "", "tokens": []}
        for index, ended in sorted(self._ends.items()):
            yield _event(empty | self._reply.last_fields(self._tally, index, ended, record))

    def _fail(self, error: APIError) -> None:
        self._end(b"data: " + error.body() + b"\n\n")


def _event(told: dict[str, Any]) -> bytes:
    return b"data: " + json_for_line(told) + b"\n\n"
