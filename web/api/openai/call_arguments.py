"""The arguments of earlier tool calls, in the form that chat templates expect. Used for chat and for responses."""

from __future__ import annotations

from typing import Any

from ...request.errors import bad_value
from ..fields import Fields, missing, wrong_type
from ..json_body import parse_json
from ..json_structure import InvalidJson, TooComplex
from ..pace import Pace

_HALF_A_CHARACTER = "surrogate"
"""In orjson's message about an escaped lone surrogate, which no tokenizer can encode."""


async def read_arguments(fields: Fields, pace: Pace) -> Any:
    """Return `arguments`, a JSON string or an object, as an object. Raises APIError.

    A model may have written what is no JSON object: that stays a string.
    """
    arguments, param = fields.get("arguments"), fields.param("arguments")
    if arguments is None:
        raise missing(param)
    if type(arguments) is dict:
        return arguments
    if type(arguments) is not str:
        raise wrong_type(param, "a string or an object")
    if not arguments:
        return {}
    pace.check_json_text(arguments, param)
    pace.rest()
    try:
        value = await parse_json(arguments.encode())
    except (InvalidJson, TooComplex) as error:
        if _HALF_A_CHARACTER in str(error):
            raise bad_value(param, f"not valid JSON: {error}", "invalid_json") from None
        return arguments
    return value if isinstance(value, dict) else arguments
