"""`prediction`: text that the client expects the answer to repeat. It makes an answer faster, and never another one."""

from __future__ import annotations

from quipu.actors.request_desk.interface import ServingInfo

from ..fields import Fields, unsupported_type
from ..pace import Pace

_FIELD = "prediction"


async def read_prediction(fields: Fields, info: ServingInfo, pace: Pace) -> tuple[str, tuple[str, ...]]:
    """Return the predicted text, and the paths of what has no effect on this server. Raises APIError."""
    if fields.get(_FIELD) is None:
        return "", ()
    prediction = fields.fields(_FIELD)
    if prediction.text("type") != "content":
        raise unsupported_type(prediction, "predictions", "`content`")
    content = prediction.get("content")
    if type(content) is str:
        text = content
    else:
        parts = []
        for part in prediction.objects(
            "content", "a string or a list of text parts", pace.check_parts, is_required=True
        ):
            await pace.tick()
            if part.text("type") != "text":
                raise unsupported_type(part, "parts", "`text`")
            parts.append(part.text("text"))
        text = "".join(parts)
    if info.settings.get("speculative", "off") == "off":
        return "", (_FIELD,)
    return text, ()
