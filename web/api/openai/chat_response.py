"""The response of `POST /v1/chat/completions`: its choices, and the chunks of its stream.

A choice has text, reasoning (`reasoning_content`, and `reasoning` as vLLM names it) and tool calls, each only if the
model wrote some. A call is sent on as the model writes it: never completed, and never corrected.

What must always hold: the chunks of a choice, put together, are its whole message; each call has its id and its name
once, before its arguments; `tool_calls` as finish reason means that a call is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import orjson

from quipu.actors.messages.handler import Delta, ScoredDelta
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.output import ArgumentsDelta, CallBegin, CallEnd, OutputEvent, ReasoningDelta, TextDelta

from ...http.sse import json_for_line
from ..content import CallBlock, CallIds, shown_events
from ..generation import GenerationRequest, WantedScores
from ..stream import Transcript
from .chunks import FUNCTION_CALL, TOOL_CALLS, ChunkWriter, id_pieces, stop_fields
from .logprobs import chat_logprobs, chat_logprobs_pieces

CALL_ID_PREFIX = "call_"
_CHUNK_START = b"data: {"


def chat_choice(transcript: Transcript, index: int, wanted: GenerationRequest, call_ids: CallIds) -> Iterator[bytes]:
    """Yield one choice of a whole response, as JSON."""
    content, scores = transcript.content(index), wanted.scores
    text, reasoning, calls = content.text, content.reasoning, content.calls
    yield b'{"index":%d,"message":{"role":"assistant","content":' % index
    yield b"null" if content.blocks and not text else orjson.dumps(text)
    yield b',"refusal":null'
    if reasoning or wanted.rules.names_reasoning:
        yield b"," + _reasoning_fields(orjson.dumps(reasoning or None))
    if calls:
        yield from _calls_pieces(calls, index, wanted, call_ids)
    yield b'},"logprobs":'
    if scores.output is None:
        yield b"null"
    else:
        outputs = transcript.scores.get(index)
        yield from chat_logprobs_pieces(() if outputs is None else (outputs,), scores)
    reason = _finish_reason(transcript.finish_reasons.get(index), wanted, has_call=content.has_complete_call)
    yield b',"finish_reason":' + orjson.dumps(reason)
    yield stop_fields(transcript.stop_matches.get(index), transcript.stop_token_ids.get(index), wanted)
    if wanted.with_token_ids:
        yield b',"token_ids":'
        yield from id_pieces(transcript.token_ids.get(index, ()))
    yield b"}"


def _calls_pieces(
    calls: Sequence[CallBlock], choice: int, wanted: GenerationRequest, call_ids: CallIds
) -> Iterator[bytes]:
    if wanted.rules.legacy_functions:
        # Their requests end with the first call.
        yield b',"function_call":' + _function(calls[0].name, str(calls[0].text))
        return
    for number, call in enumerate(calls):
        yield b"," if number else b',"tool_calls":['
        call_id = orjson.dumps(call_ids.call_id(CALL_ID_PREFIX, choice, call.index))
        yield b'{"id":%b,"type":"function","function":%b}' % (call_id, _function(call.name, str(call.text)))
    yield b"]"


def _function(name: str, arguments: str) -> bytes:
    return json_for_line({"name": name, "arguments": arguments})


def _reasoning_fields(text: bytes) -> bytes:
    return b'"reasoning_content":%b,"reasoning":%b' % (text, text)


def _finish_reason(reason: FinishReason | None, wanted: GenerationRequest, *, has_call: bool) -> str | None:
    if reason is not FinishReason.STOP or not has_call:
        return reason
    return FUNCTION_CALL if wanted.rules.legacy_functions else TOOL_CALLS


class ChatWriter(ChunkWriter):
    """Chunks of a chat completion: the role, each event, and last an empty delta with the finish reason."""

    OBJECT_NAME = "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._heads: dict[int, bytes] = {}
        """Everything before the contents of a delta, for each choice whose role has been sent."""
        self._called: set[int] = set()
        """The choices that have a complete call."""
        names_reasoning = self._wanted.rules.names_reasoning
        self._delta_end = b"," + _reasoning_fields(b"null") + b"}" if names_reasoning else b"}"
        """The end of a delta without reasoning. Some clients read the field in every chunk."""
        self._empty_delta = self._delta_end.lstrip(b",")

    def render(self, delta: Delta) -> bytes:
        role = b""
        head = self._heads.get(delta.index)
        if head is None:
            # A message without text has no content, so its first delta must have none.
            role = self._open(delta.index, b"null" if delta.events else b'""')
            head = self._heads[delta.index]
        self._tally.add(delta)
        if delta.events:
            text = self._events(head, delta)
        elif self._shows_every_token:
            text = head + b'"content":' + json_for_line(delta.text) + self._delta_end + self._told_tail(delta, None)
        elif delta.text:
            text = head + b'"content":' + json_for_line(delta.text) + self._delta_end + self._tail()
        else:
            text = b""
        if delta.finish_reason is None:
            return role + text
        reason = _finish_reason(delta.finish_reason, self._wanted, has_call=delta.index in self._called)
        return role + text + head + self._empty_delta + self._last_tail(delta, reason or delta.finish_reason)

    def _open(self, index: int, content: bytes) -> bytes:
        """Return the first chunk of a choice, after those of the choices before it, as OpenAI's client expects them."""
        opened = [number for number in range(index + 1) if number not in self._heads]
        first = b'"role":"assistant","content":' + content + self._delta_end + self._tail()
        self._heads |= {number: self._choice_head + b'%d,"delta":{' % number for number in opened}
        return b"".join(self._heads[number] + first for number in opened)

    def _events(self, head: bytes, delta: Delta) -> bytes:
        """Return a chunk for each event, the first with the logprobs and token ids."""
        tail = self._tail()
        next_tail = self._told_tail(delta, None) if self._shows_every_token else tail
        chunks: list[bytes] = []
        for event in shown_events(delta.events, with_reasoning=self._wanted.include_reasoning):
            if isinstance(event, CallEnd):
                self._called.add(delta.index)
                continue
            end = b"}" if isinstance(event, ReasoningDelta) else self._delta_end
            chunks += (head, self._fields(event, delta.index), end, next_tail)
            next_tail = tail
        if not chunks and self._shows_every_token:
            chunks = [head, self._empty_delta, next_tail]
        return b"".join(chunks)

    def _fields(self, event: OutputEvent, choice: int) -> bytes:
        is_legacy = self._wanted.rules.legacy_functions
        match event:
            case TextDelta():
                return b'"content":' + json_for_line(event.text)
            case ReasoningDelta():
                return _reasoning_fields(json_for_line(event.text))
            case ArgumentsDelta():
                text = json_for_line(event.text)
                if is_legacy:
                    return b'"function_call":{"arguments":%b}' % text
                return b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (event.index, text)
            case CallBegin():
                function = _function(event.name, "")
                if is_legacy:
                    return b'"function_call":' + function
                call_id = orjson.dumps(self._call_ids.call_id(CALL_ID_PREFIX, choice, event.index))
                begun = (event.index, call_id, function)
                return b'"tool_calls":[{"index":%d,"id":%b,"type":"function","function":%b}]' % begun
        return b""

    def scores(self, delta: ScoredDelta, wanted: WantedScores) -> dict[str, Any] | None:
        return chat_logprobs(delta.scores, wanted) if delta.scores else None

    def prompt_ids(self, index: int, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Return a choice's first chunk, in pieces. That of the first choice has the ids of the prompt."""
        is_first = not self._heads
        role = self._open(index, b'""')
        if not is_first:
            return iter((role,) if role else ())
        rest = b"," + role[len(_CHUNK_START) :]
        return chain((_CHUNK_START + b'"prompt_token_ids":',), id_pieces(token_ids), (rest,))
