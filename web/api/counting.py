"""Counting the tokens of a prompt that is not served.

What must always hold: a body is read as the endpoint that would serve it reads it, so that the number is that of its
usage.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs

from quipu.actors.messages.prompts import Prompt
from quipu.actors.request_desk.interface import Desk

from ..request.request_context import current_request_context
from .bodies import take_body
from .body_table import SHAPES
from .fields import parse_object
from .ignored_fields import ignored_fields


@attrs.frozen
class CountedPrompt:
    prompt: Prompt
    param: str
    """The field that it comes from, for errors."""
    unused_fields: tuple[str, ...]


CountReader = Callable[[dict[str, Any], Callable[[int], object]], Awaitable[CountedPrompt]]
"""Checks a body. Takes what memory it needs beyond that of the body's share. Raises APIError."""


async def count_tokens(endpoint: str, read: CountReader, desk: Desk) -> int:
    """Return how many prompt tokens the current request's body would have at an endpoint.

    Raises APIError, and what the desk raises.
    """
    data, share = await take_body()
    context, parsed = current_request_context(), await parse_object(data, share.grow)
    counted = await read(parsed, share.grow)
    context.ignored_fields = (await ignored_fields(parsed, SHAPES[endpoint], counted.unused_fields)).header
    del data, parsed
    return await desk.count_tokens(counted.prompt, counted.param, context.principal.tenant)
