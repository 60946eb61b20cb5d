"""Bodies of requests that change or make something and generate nothing: read as they are declared."""

from __future__ import annotations

from ..request.request_context import current_request_context
from .bodies import take_body
from .body_field import Shape
from .fields import Fields, parse_object
from .ignored_fields import ignored_fields


async def read_small_body(declared: Shape) -> Fields:
    """Return the fields of the current request's body. Raises APIError; unknown fields are reported as ignored."""
    data, share = await take_body()
    body = await parse_object(data, share.grow)
    current_request_context().ignored_fields = (await ignored_fields(body, declared)).header
    return Fields(body, declared=declared)
