"""Models in the shape of Anthropic's API. Shown by `web/api/models.py`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from quipu.actors.request_desk.interface import ServingInfo

from ...request.errors import bad_value
from ..query import Parameters

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000


def list_models(info: ServingInfo, parameters: Parameters) -> dict[str, Any]:
    """Return a page of the models: `limit` of them, after `after_id` or before `before_id`. Raises APIError."""
    names = info.model_names
    limit = parameters.whole("limit", 1, MAX_LIMIT) or DEFAULT_LIMIT
    start, end = _place(names, parameters, "after_id", -1) + 1, _place(names, parameters, "before_id", len(names))
    if parameters.text("before_id") is not None and parameters.text("after_id") is None:
        page, has_more = names[max(start, end - limit) : end], end - start > limit  # the last ones before it
    else:
        page, has_more = names[start:end][:limit], end - start > limit
    return {
        "data": [describe_model(name, info) for name in page],
        "has_more": has_more,
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def _place(names: Sequence[str], parameters: Parameters, cursor: str, default: int) -> int:
    name = parameters.text(cursor)
    if name is None:
        return default
    if name not in names:
        raise bad_value(cursor, "must be the id of a model in this list")
    return names.index(name)


def describe_model(name: str, info: ServingInfo) -> dict[str, Any]:
    length = info.passed_on.get(name, info.max_model_len)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(info.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "max_input_tokens": length,
        "max_tokens": length,
        "capabilities": None,
    }
