"""`GET /v1/models` and `GET /v1/models/{name}`, which the OpenAI and the Anthropic API share.

A client that sends `anthropic-version` is answered in the shape of the Anthropic API, every other one in OpenAI's.
"""

from __future__ import annotations

from typing import Any

from quart import request
from quart_trio import QuartTrio

from quipu.actors.request_desk.interface import Desk

from ..request.errors import no_model, speaks_anthropic
from .anthropic import models as anthropic
from .openai import models as openai
from .query import Parameters


def install_models(app: QuartTrio, desk: Desk) -> None:
    """Register the routes."""

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        if speaks_anthropic():
            return anthropic.list_models(desk.info, Parameters(request.args))
        return openai.list_models(desk.info)

    @app.get("/v1/models/<path:name>")  # model names contain slashes
    async def show_model(name: str) -> dict[str, Any]:
        info = desk.info
        if name not in info.model_names:
            raise no_model(name, info.model_names)
        if speaks_anthropic():
            return anthropic.describe_model(name, info)
        return openai.describe_model(name, info)
