"""The response object of `POST /v1/responses` and its usage, in whole responses and in the events of a stream.

Each version of the object (in progress, completed, incomplete, failed) has all fields that the types of OpenAI's client
require.

What must always hold: only the last version has usage, and it comes from the same record as on the other endpoints.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import attrs

from quipu.actors.messages.usage_record import UsageRecord

from ...http.sse import json_for_line
from ...request.errors import APIError
from ...request.tally import Tally
from ..generation import GenerationRequest
from ..usage import openai_usage, tallied_usage


@attrs.frozen
class ResponseVersions:
    response_id: str
    created_at: int
    """Unix seconds."""
    echo: Mapping[str, Any]
    wanted: GenerationRequest

    def body(
        self,
        status: str,
        *,
        usage: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
        incomplete_details: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return one version of the object, without its items."""
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": incomplete_details,
            "output": [],
            "usage": usage,
            **self.echo,
        }

    def served(self, record: UsageRecord, *, is_cut: bool) -> dict[str, Any]:
        """Return the last version of a successful response, incomplete if its token limit cut it."""
        return self.body(
            "incomplete" if is_cut else "completed",
            usage=response_usage(
                openai_usage(record, with_tiers=self.wanted.delivery.with_tiers, image_tokens=self.wanted.image_tokens)
            ),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        )

    def failed(self, error: APIError, known: UsageRecord | Tally) -> dict[str, Any]:
        """Return the last version of a failed response."""
        # The client's types have a fixed list of codes that lacks ours.
        code = "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"
        told = {"code": code, "message": error.message, "type": error.error_type, "param": error.param}
        return self.body("failed", usage=_known_usage(known, self.wanted.image_tokens), error=told)

    def cancelled(self, record: UsageRecord) -> dict[str, Any]:
        """Return the last version of a response that its client has cancelled."""
        return self.body("cancelled", usage=_known_usage(record, self.wanted.image_tokens))


def _known_usage(known: UsageRecord | Tally, image_tokens: int | None) -> dict[str, Any] | None:
    """Return the usage of what was not served; None if nothing was counted, as clients' types require numbers."""
    if known.prompt_tokens is None:
        return None
    if isinstance(known, Tally):
        usage = tallied_usage(known, with_tiers=False, image_tokens=image_tokens)
    else:
        usage = openai_usage(known, with_tiers=False, image_tokens=image_tokens)
    return None if usage is None else response_usage(usage)


def with_items(body: dict[str, Any], items: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """Yield a version of the object with its items, as JSON on one line."""
    yield json_for_line({name: value for name, value in body.items() if name != "output"})[:-1] + b',"output":['
    for number, item in enumerate(items):
        yield (b"," if number else b"") + json_for_line(item)
    yield b"]}"


def response_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage of a chat completion under this endpoint's names (docs/use/usage.md)."""
    inputs = {name: value for name, value in usage["prompt_tokens_details"].items() if name != "audio_tokens"}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": inputs,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
