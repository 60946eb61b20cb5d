"""`POST /v1/completions`: its body, its answer, and the chunks of its stream.

A prompt is a text, a list of texts, a list of token ids, or a list of lists of token ids; choice `n` of prompt `p` has
the index `p * n_choices + n`.
"""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.front import ServingInfo
from quipu.actors.messages import Delta, Prompt, ScoredDelta, TextPrompt, TokenPrompt
from quipu.web.errors import invalid
from quipu.web.fields import Fields, many_token_ids, missing, wrong_type
from quipu.web.generation import GenerationRequest, WantedScores, read_model
from quipu.web.openai.generation import read_generation, read_limit
from quipu.web.openai.logprobs import completion_logprobs, prompt_logprobs, read_completion_scores
from quipu.web.openai.render import ChunkWriter
from quipu.web.openai.unsupported import COMPLETIONS, refuse_unsupported
from quipu.web.pace import Pace
from quipu.web.sse import json_for_line
from quipu.web.stream import Transcript

ENDPOINT = "/v1/completions"
ID_PREFIX = "cmpl-"
OBJECT_NAME = "text_completion"
DEFAULT_MAX_TOKENS = 16
_NUM_LOOKED_AT = 1024
"""Members of a list that tell what it is a list of."""
_PROMPT_TYPES = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


async def read_completion(body: dict[str, Any], info: ServingInfo, max_sequences: int) -> GenerationRequest:
    """Check a body. Raises APIError."""
    fields = Fields(body)
    model = read_model(fields, info)
    refuse_unsupported(fields, COMPLETIONS)
    scores = read_completion_scores(fields)
    # with its prompt echoed, a completion may be empty: its prompt's logprobs are what is wanted of it
    limit = read_limit(fields, least=0 if scores.echo else 1)
    if limit.num_tokens is None:
        limit = attrs.evolve(limit, num_tokens=DEFAULT_MAX_TOKENS)
    request = read_generation(
        fields,
        info,
        model=model,
        prompts=await _read_prompts(fields, info, max_sequences),
        prompt_param="prompt",
        limit=limit,
        max_sequences=max_sequences,
        scores=scores,
    )
    best_of = fields.integer("best_of", 1)
    if best_of is not None and best_of != request.num_choices:
        raise invalid("`best_of` is only supported when it equals `n`.", "best_of", "unsupported_parameter")
    return request


async def _read_prompts(fields: Fields, info: ServingInfo, max_sequences: int) -> tuple[Prompt, ...]:
    value, pace = fields.get("prompt"), Pace()
    if value is None:
        raise missing("prompt")
    if type(value) is str:
        return (TextPrompt(value),)
    if type(value) is not list:
        raise wrong_type("prompt", _PROMPT_TYPES)
    if not value:
        raise invalid("`prompt` must not be an empty list.", "prompt")
    kinds = set(map(type, value[:_NUM_LOOKED_AT]))
    if kinds == {int}:
        return (await _token_prompt(value, "prompt", info, pace),)
    if len(value) > max_sequences:
        raise invalid(f"`prompt` may hold at most {max_sequences} prompts.", "prompt")
    kinds = set(map(type, value))
    if len(kinds) > 1 or not kinds <= {str, list}:
        raise wrong_type("prompt", _PROMPT_TYPES)
    if kinds == {str}:
        return tuple(map(TextPrompt, value))
    return tuple([await _token_prompt(ids, f"prompt[{index}]", info, pace) for index, ids in enumerate(value)])


async def _token_prompt(ids: list[Any], where: str, info: ServingInfo, pace: Pace) -> TokenPrompt:
    if not ids:
        raise invalid(f"`{where}` must have at least one token.", "prompt")
    if len(ids) > info.max_model_len:
        message = f"`{where}` has {len(ids)} tokens; the model's context holds {info.max_model_len}."
        raise invalid(message, "prompt", "context_length_exceeded")
    return TokenPrompt(await many_token_ids(ids, "prompt", info.vocab_size, pace))


def completion_choice(transcript: Transcript, index: int, wanted: WantedScores) -> dict[str, Any]:
    """One choice of a whole answer."""
    prompt, outputs = transcript.prompt_scores.get(index, []), transcript.scores.get(index, [])
    told = [*prompt, *outputs] if wanted.echo else outputs
    choice = {
        "index": index,
        "text": transcript.text(index),
        "logprobs": None if wanted.drawn is None else completion_logprobs(told, wanted.drawn),
        "finish_reason": transcript.finish_reasons.get(index),
    }
    if wanted.prompt is not None:
        choice["prompt_logprobs"] = prompt_logprobs(prompt, wanted.prompt)
    return choice


class CompletionWriter(ChunkWriter):
    """Chunks of a text completion; the finish reason rides on the last text."""

    OBJECT_NAME = OBJECT_NAME

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._heads: dict[int, bytes] = {}
        """Everything before a choice's text."""

    def render(self, delta: Delta) -> bytes:
        self._tally.add(delta)
        head = self._heads.get(delta.index)
        if head is None:
            head = self._heads[delta.index] = self._choice_head + b'%d,"text":' % delta.index
        if self._num_top is None:
            tail = self._tail(delta.finish_reason)
        else:
            tail = self._scored_tail(delta, self._num_top, delta.finish_reason)
        return head + json_for_line(delta.text) + tail

    def scores(self, delta: ScoredDelta, num_top: int) -> dict[str, Any] | None:
        told = [*delta.prompt_scores, *delta.scores]
        return completion_logprobs(told, num_top) if told else None
