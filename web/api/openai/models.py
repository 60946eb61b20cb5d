"""`GET /v1/models`: what is served here, in the shape of the OpenAI API with the field's usual extras.

A client that speaks Anthropic's API (`anthropic-version`) is answered in that API's shape.
"""

from __future__ import annotations

from typing import Any

from quart_trio import QuartTrio

from quipu.actors.request_desk.interface import Desk, ServingInfo

from ..anthropic import models as anthropic_models
from ..errors import no_model, speaks_anthropic

OWNER = "quipu"


def describe_model(name: str, info: ServingInfo) -> dict[str, Any]:
    """One entry of the list. `root` is the model's own name, whichever name it was asked for by."""
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


def install_models(app: QuartTrio, desk: Desk) -> None:
    """Register the routes."""

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        info = desk.info
        if speaks_anthropic():
            return anthropic_models.list_models(info)
        return {"object": "list", "data": [describe_model(name, info) for name in info.model_names]}

    # Names of models have slashes.
    @app.get("/v1/models/<path:name>")
    async def show_model(name: str) -> dict[str, Any]:
        info = desk.info
        if name not in info.model_names:
            raise no_model(name)
        return anthropic_models.describe_model(name, info) if speaks_anthropic() else describe_model(name, info)
