"""Models in the shape of Anthropic's API. Shown by `web/api/models.py`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from quipu.actors.request_desk.interface import ServingInfo


def list_models(info: ServingInfo) -> dict[str, Any]:
    """Return all models, on one page."""
    names = info.model_names
    data = [describe_model(name, info) for name in names]
    return {
        "data": data,
        "has_more": False,
        "first_id": next(iter(names), None),
        "last_id": next(reversed(names), None),
    }


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
