"""`POST /v1/completions`: its body, its response, and the chunks of its stream.

A prompt is a text, a list of texts, a list of token ids, or a list of lists of token ids; choice `n` of prompt `p` has
the index `p * n_choices + n`. With a `suffix`, each text is what stands before a gap, and the suffix is what stands
after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import attrs
import orjson

from quipu.actors.config.declarations import COMPLETIONS
from quipu.actors.messages.handler import Delta, ScoredDelta
from quipu.actors.messages.prompts import InfillPrompt, Prompt, TextPrompt
from quipu.actors.messages.scores import TokenScores
from quipu.actors.request_desk.interface import ServingInfo

from ...http.sse import json_for_line
from ...request.errors import bad_value
from ..content import CallIds
from ..declared_body import Body
from ..generation import GenerationRequest, WantedScores, read_model
from ..output_grammar import read_openai_grammar
from ..pace import Pace
from ..pooled_bodies import TRUNCATION
from ..request_reader import read_limit, read_request
from ..stream import Transcript
from .chunks import ChunkWriter, id_pieces, stop_fields
from .logprobs import (
    completion_logprobs,
    completion_logprobs_pieces,
    prompt_logprobs_pieces,
    read_completion_scores,
    slices,
)
from .prompt_cache import PREWARM, read_cache_wishes
from .prompt_lists import PROMPT_TYPES, read_prompts

OBJECT_NAME = "text_completion"
DEFAULT_MAX_TOKENS = 16
MAX_ECHO_CHARS = 1 << 14
"""In one chunk of a prompt that is echoed without logprobs."""


async def read_completion(
    body: dict[str, Any],
    info: ServingInfo,
    max_sequences: int,
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
    prompt_types: str = PROMPT_TYPES,
) -> GenerationRequest:
    """Check a body. Raises APIError.

    `default_max_tokens`: None for what the context has room for. `prompt_types`: of the client's prompts, for messages.
    """
    fields = Body(body, COMPLETIONS)
    model = read_model(fields, info)
    fields.refuse_unsupported()
    scores = read_completion_scores(fields)
    limit = read_limit(fields)
    if limit.num_tokens is None:
        limit = attrs.evolve(limit, num_tokens=default_max_tokens)
    async with Pace() as pace:
        prompts = await read_prompts(fields, "prompt", info, max_sequences, pace, prompt_types)
        grammar = await read_openai_grammar(fields, pace)
    if suffix := fields.optional_text("suffix"):
        prompts = _with_gap(prompts, suffix, fields)
    request = read_request(
        fields, info, model=model, prompts=prompts, limit=limit, max_sequences=max_sequences, scores=scores
    )
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != request.num_choices:
        raise bad_value(
            "best_of", "must equal `n`; other values are not supported by this server", "unsupported_parameter"
        )
    wishes = read_cache_wishes(fields)
    request = attrs.evolve(
        request,
        grammar=grammar,
        with_token_ids=fields.flag("return_token_ids"),
        unused_fields=(*wishes.unused, *wishes.named),  # a text has no parts to keep
    )
    return request.prewarmed(PREWARM) if wishes.prewarm else request


def _with_gap(prompts: tuple[Prompt, ...], suffix: str, fields: Body) -> tuple[Prompt, ...]:
    """Return prompts whose gaps come before the same text. Raises APIError."""
    for name, is_given in (
        ("echo", fields.get("echo")),
        (TRUNCATION, fields.get(TRUNCATION)),
        ("add_special_tokens", not fields.flag("add_special_tokens")),
    ):
        if is_given:
            raise bad_value(name, "not allowed together with `suffix`", "unsupported_parameter")
    texts = [prompt.text for prompt in prompts if isinstance(prompt, TextPrompt)]
    if len(texts) < len(prompts):
        raise bad_value("suffix", "only allowed if `prompt` is text", "unsupported_parameter")
    return tuple(InfillPrompt(text, suffix, "suffix") for text in texts)


def completion_choice(
    transcript: Transcript, index: int, wanted: GenerationRequest, _call_ids: CallIds
) -> Iterator[bytes]:
    """Yield one choice of a whole response, as JSON."""
    scores = wanted.scores
    prompt, outputs = transcript.of_prompt(index).scores, transcript.scores.get(index)
    yield b'{"index":%d,"text":' % index
    yield orjson.dumps(transcript.content(index).text)
    yield b',"logprobs":'
    if scores.output is None:
        yield b"null"
    else:
        told = (prompt if scores.echo else None, outputs)
        yield from completion_logprobs_pieces((part for part in told if part is not None), scores)
    yield b',"finish_reason":' + orjson.dumps(transcript.finish_reasons.get(index))
    yield stop_fields(transcript.stop_matches.get(index), transcript.stop_token_ids.get(index), wanted)
    if scores.prompt is not None:
        yield b',"prompt_logprobs":'
        yield from prompt_logprobs_pieces(prompt, scores.prompt)
    if wanted.with_token_ids:
        yield b',"prompt_token_ids":'
        yield from id_pieces(transcript.of_prompt(index).token_ids or ())
        yield b',"token_ids":'
        yield from id_pieces(transcript.token_ids.get(index, ()))
    yield b"}"


class CompletionWriter(ChunkWriter):
    """Chunks of a text completion; the last text carries the finish reason."""

    OBJECT_NAME = OBJECT_NAME

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._heads: dict[int, bytes] = {}
        """Everything before a choice's text."""

    def render(self, delta: Delta) -> bytes:
        self._tally.add(delta)
        head = self._head(delta.index)
        if self._shows_every_token:
            tail = self._told_tail(delta, delta.finish_reason)
        else:
            tail = self._tail() if delta.finish_reason is None else self._last_tail(delta, delta.finish_reason)
        return head + json_for_line(delta.text) + tail

    def _head(self, index: int) -> bytes:
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._choice_head + b'%d,"text":' % index
        return head

    def prompt_ids(self, index: int, token_ids: Sequence[int]) -> Iterator[bytes]:
        # the usage so far is told as it is now, not when the client reads
        return chain((self._head(index) + b'"","prompt_token_ids":',), id_pieces(token_ids), (self._tail(),))

    def prompt(self, delta: ScoredDelta, scores: TokenScores) -> Iterator[bytes]:
        head, tail, text, num_top = self._head(delta.index), self._tail(), delta.text, self._num_top
        if num_top is None:
            return (
                head + json_for_line(text[start : start + MAX_ECHO_CHARS]) + tail
                for start in range(0, len(text), MAX_ECHO_CHARS)
            )
        return self._scored_echo(head, tail, text, scores, num_top)

    def _scored_echo(self, head: bytes, tail: bytes, text: str, scores: TokenScores, num_top: int) -> Iterator[bytes]:
        start = 0
        for some in slices(scores, num_top):
            end = len(text) if some.stop == len(scores) else max(start, scores.offset(some.stop))
            told = completion_logprobs(list(scores.tokens(some.start, some.stop, num_top)), self._wanted.scores)
            yield head + json_for_line(text[start:end]) + self.with_logprobs(tail, told)
            start = end

    def scores(self, delta: ScoredDelta, wanted: WantedScores) -> dict[str, Any] | None:
        return completion_logprobs(delta.scores, wanted) if delta.scores else None
