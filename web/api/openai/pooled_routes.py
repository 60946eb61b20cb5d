"""The routes of embeddings, scores and reranking. Registered by `install_pooled`."""

from __future__ import annotations

from quart import Response
from quart_trio import QuartTrio

from quipu.actors.config.declarations import EMBEDDINGS
from quipu.actors.request_desk.interface import Desk

from ...options import AppOptions
from ..answer import answer
from ..json_structure import MAX_VALUES
from ..operation import route
from . import pooled_schemas as schemas
from .embeddings import read_embeddings


def install_pooled(app: QuartTrio, desk: Desk, options: AppOptions) -> None:
    """Register the endpoints."""

    @route(app, f"POST {EMBEDDINGS}", schemas.EMBEDDINGS)
    async def create_embeddings() -> Response:
        return await answer(EMBEDDINGS, read_embeddings, desk, options, MAX_VALUES)
