"""The response object and its usage: what `POST /v1/responses` answers, and what the events of its stream carry.

Made once a request; each version of the object (in progress, completed, incomplete, failed) is a projection of it. Its
fields are those that the OpenAI client's types require, so that a typed reader finds all of them.

What must always hold: usage stands on the last version only, and comes from the record that the other endpoints show.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import attrs

from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.usage_record import UsageRecord

from ...request.errors import APIError
from ...request.tally import Tally
from ..usage import openai_usage, tallied_usage


@attrs.frozen
class Draft:
    """One response: what all versions of its object share."""

    response_id: str
    item_id: str
    """Of its only output item."""
    created_at: int
    """Unix seconds."""
    echo: Mapping[str, Any]
    """What is repeated of the request."""
    with_tiers: bool = False

    def body(
        self,
        status: str,
        *,
        output: list[dict[str, Any]] | None = None,
        usage: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
        incomplete_details: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The object in one of its versions."""
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": incomplete_details,
            "output": output or [],
            "usage": usage,
            **self.echo,
        }

    def served(self, text: str, finish_reason: FinishReason | None, record: UsageRecord) -> dict[str, Any]:
        """The last version of a response that was answered: completed, or cut short by its limit."""
        is_cut = finish_reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        return self.body(
            status,
            output=[self.message(status, text)],
            usage=response_usage(openai_usage(record, with_tiers=self.with_tiers)),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        )

    def failed(self, text: str | None, error: APIError, known: UsageRecord | Tally) -> dict[str, Any]:
        """The last version of a response that failed, with as much of its text as was sent. None: no item was begun."""
        usage = (
            tallied_usage(known, with_tiers=False)
            if isinstance(known, Tally)
            else openai_usage(known, with_tiers=False)
        )
        return self.body(
            "failed",
            output=[] if text is None else [self.message("incomplete", text)],
            usage=None if usage is None else response_usage(usage),
            error=_describe(error),
        )

    def message(self, status: str, text: str | None = None) -> dict[str, Any]:
        """The output item; without a text it has no content yet."""
        content = [] if text is None else [text_part(text)]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def text_part(text: str) -> dict[str, Any]:
    """The only part of the output item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def response_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a chat completion in this endpoint's words (specification of usage, section 3)."""
    inputs = {name: value for name, value in usage["prompt_tokens_details"].items() if name != "audio_tokens"}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": inputs,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }


def _describe(error: APIError) -> dict[str, Any]:
    # The client's type knows a fixed list of codes; ours are not in it.
    code = "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"
    return {"code": code, "message": error.message, "type": error.error_type, "param": error.param}
