"""The routes of embeddings, scores and reranking. Registered by `install_pooled`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from quart import Response
from quart_trio import QuartTrio

from quipu.actors.config.declarations import EMBEDDINGS, RERANKS, SCORES
from quipu.actors.request_desk.interface import Desk

from ...options import AppOptions
from ..answer import ParsedRequest, Reply, answer
from ..json_structure import MAX_VALUES
from ..operation import Operation, route
from . import pooled_schemas as schemas
from .embeddings import read_embeddings
from .reranking import read_rerank
from .scores import read_scores


def install_pooled(app: QuartTrio, desk: Desk, options: AppOptions) -> None:
    """Register the endpoints."""

    @route(app, f"POST {EMBEDDINGS}", schemas.EMBEDDINGS)
    async def create_embeddings() -> Response:
        return await answer(EMBEDDINGS, read_embeddings, desk, options, MAX_VALUES)

    for endpoint in SCORES:
        _install(app, desk, options, endpoint, read_scores, schemas.SCORES)
    for endpoint in RERANKS:
        _install(app, desk, options, endpoint, read_rerank, schemas.RERANKS[endpoint])


def _install(
    app: QuartTrio,
    desk: Desk,
    options: AppOptions,
    endpoint: str,
    read: Callable[[str, ParsedRequest], Awaitable[Reply]],
    operation: Operation,
) -> None:
    @route(app, f"POST {endpoint}", operation)
    async def score() -> Response:
        return await answer(endpoint, partial(read, endpoint), desk, options)
