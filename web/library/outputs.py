"""What a request returns: values under the names of vLLM's `RequestOutput`, made from a response's body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import orjson


@attrs.frozen
class Usage:
    """Tokens of a request, as its usage record has them (docs/use/usage.md)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """Prompt tokens that were reused. None: unknown, which is not 0."""
    cache_write_tokens: int | None
    reasoning_tokens: int


@attrs.frozen
class CompletionOutput:
    """One choice."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls` and so on; None while it is being generated."""
    logprobs: Any = None
    """As in the response of the endpoint."""
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """As in a chat's message: `{"id", "type", "function": {"name", "arguments"}}`."""


@attrs.frozen
class RequestOutput:
    """The output of a request, complete or so far."""

    request_id: str
    """The server's own, as in the ledger."""
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    usage: Usage | None = None
    """None until it has finished."""
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: Any = None

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that were reused, once the request has finished."""
        return None if self.usage is None else self.usage.cached_tokens


def output_of(request_id: str, body: bytes) -> RequestOutput:
    """Return the output of a complete response of either endpoint."""
    answer = orjson.loads(body)
    first = answer["choices"][0]
    return RequestOutput(
        request_id,
        tuple(_choice(choice) for choice in answer["choices"]),
        finished=True,
        usage=_usage(answer["usage"]),
        prompt_token_ids=tuple(answer.get("prompt_token_ids") or first.get("prompt_token_ids") or ()),
        prompt_logprobs=answer.get("prompt_logprobs") or first.get("prompt_logprobs"),
    )


def _choice(choice: Mapping[str, Any]) -> CompletionOutput:
    message = choice.get("message")
    text = choice["text"] if message is None else message.get("content") or ""
    return CompletionOutput(
        index=choice["index"],
        text=text,
        token_ids=tuple(choice.get("token_ids") or ()),
        finish_reason=choice["finish_reason"],
        logprobs=choice.get("logprobs"),
        reasoning=None if message is None else message.get("reasoning_content"),
        tool_calls=() if message is None else tuple(message.get("tool_calls") or ()),
    )


def _usage(usage: Mapping[str, Any]) -> Usage:
    prompt = usage["prompt_tokens_details"]
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=prompt.get("cached_tokens"),
        cache_write_tokens=prompt.get("cache_write_tokens"),
        reasoning_tokens=usage["completion_tokens_details"]["reasoning_tokens"],
    )
