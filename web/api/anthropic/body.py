"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`.

Unknown fields are ignored, as Anthropic's API ignores those of betas, and reported to the client. Fields that would
change the response and are not implemented are refused by name.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import attrs

from quipu.actors.config.declarations import MESSAGES
from quipu.actors.request_desk.interface import ServingInfo

from ...options import AppOptions
from ...request.errors import APIError
from ..declared_body import Body
from ..fields import missing
from ..generation import Delivery, GenerationRequest, TokenLimit, read_affinity_key, read_model
from ..image_parts import ImageParts
from ..request_reader import read_request
from .prompt import AskedPrompt, read_prompt


async def read_messages_request(body: dict[str, Any], info: ServingInfo, options: AppOptions) -> GenerationRequest:
    """Check a body. Raises APIError."""
    fields = Body(body, MESSAGES)
    model = read_model(fields, info)
    if fields.get("thread") is not None:  # a conversation held by the server; clients then send the whole of it
        message = "`thread` is not supported by this server: send the full conversation without it."
        details = {"error_code": "thread_unsupported_request"}
        raise APIError(HTTPStatus.BAD_REQUEST, message, "invalid_request_error", param="thread", details=details)
    prompt = await _read_counted(fields, info, options)
    max_tokens = fields.integer("max_tokens")
    if max_tokens is None:
        raise missing("max_tokens")
    fields.refuse_unknown()
    request = read_request(
        fields,
        info,
        model=model,
        prompts=(prompt.chat,),
        limit=TokenLimit(max_tokens, "max_tokens"),
        max_sequences=options.max_sequences,
        affinity_key=read_affinity_key(fields.fields("metadata"), "user_id"),
    )
    request = attrs.evolve(
        request,
        system_param="system",
        output=prompt.output,
        grammar=prompt.grammar,
        thinking_budget=prompt.thinking_budget,
        unused_fields=prompt.unused_fields,
        delivery=Delivery(stream=fields.flag("stream")),
    )
    return request if max_tokens else request.prewarmed("max_tokens")


async def read_count(body: dict[str, Any], info: ServingInfo, options: AppOptions) -> AskedPrompt:
    """Check a body whose tokens are only to be counted. Raises APIError."""
    fields = Body(body, MESSAGES)
    read_model(fields, info)
    return await _read_counted(fields, info, options)


async def _read_counted(fields: Body, info: ServingInfo, options: AppOptions) -> AskedPrompt:
    fields.refuse_unsupported()
    images = ImageParts(info.images)
    return await read_prompt(fields, info.output, images, keep_billing_header=options.keep_billing_header)
