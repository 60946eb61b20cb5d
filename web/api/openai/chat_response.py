"""The response of `POST /v1/chat/completions`: its choices, and the chunks of its stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from quipu.actors.messages.handler import Delta, ScoredDelta

from ...http.sse import json_for_line
from ..generation import WantedScores
from ..stream import Transcript
from .chunks import ChunkWriter
from .logprobs import chat_logprobs, chat_logprobs_pieces, prompt_logprobs_pieces


def chat_choice(transcript: Transcript, index: int, wanted: WantedScores) -> Iterator[bytes]:
    """Yield one choice of a whole response, as JSON."""
    outputs = transcript.scores.get(index)
    yield b'{"index":%d,"message":{"role":"assistant","content":' % index
    yield orjson.dumps(transcript.text(index))
    yield b',"refusal":null},"logprobs":'
    if wanted.output is None:
        yield b"null"
    else:
        yield from chat_logprobs_pieces(() if outputs is None else (outputs,), wanted.output)
    yield b',"finish_reason":' + orjson.dumps(transcript.finish_reasons.get(index))
    if wanted.prompt is not None:
        yield b',"prompt_logprobs":'
        yield from prompt_logprobs_pieces(transcript.prompt_scores.get(index), wanted.prompt)
    yield b"}"


class ChatWriter(ChunkWriter):
    """Chunks of a chat completion: the role, the text, and last an empty delta with the finish reason."""

    OBJECT_NAME = "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._heads: dict[int, bytes] = {}
        """Everything before the contents of a delta, for each choice whose role has been sent."""

    def render(self, delta: Delta) -> bytes:
        role = b""
        head = self._heads.get(delta.index)
        if head is None:
            head = self._heads[delta.index] = self._choice_head + b'%d,"delta":{' % delta.index
            role = head + b'"role":"assistant","content":""}' + self._tail(None)
        self._tally.add(delta)
        text = b""
        if self._num_top is not None:
            tail = self._scored_tail(delta, self._num_top, None)
            text = head + b'"content":' + json_for_line(delta.text) + b"}" + tail
        elif delta.text:
            text = head + b'"content":' + json_for_line(delta.text) + b"}" + self._tail(None)
        end = head + b"}" + self._tail(delta.finish_reason) if delta.finish_reason is not None else b""
        return role + text + end

    def scores(self, delta: ScoredDelta, num_top: int) -> dict[str, Any] | None:
        return chat_logprobs(delta.scores, num_top) if delta.scores else None
