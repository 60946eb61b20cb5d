"""Models in the shape of the OpenAI API, with the field's usual extras. Shown by `web/api/models.py`."""

from __future__ import annotations

from typing import Any

from quipu.actors.request_desk.interface import ServingInfo

OWNER = "quipu"


def list_models(info: ServingInfo) -> dict[str, Any]:
    """Return every name under which the model is served."""
    return {"object": "list", "data": [describe_model(name, info) for name in info.model_names]}


def describe_model(name: str, info: ServingInfo) -> dict[str, Any]:
    """Return one entry of the list. `root` is the model's own name, whichever name the client asked for."""
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": OWNER,
        "root": info.model_names[0],
        "parent": None,
        "max_model_len": info.max_model_len,
        "block_size": info.block_size,
    }
