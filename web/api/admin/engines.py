"""Endpoints by which operators list, add, drain and remove engines.

    GET    /v1/admin/engines               list all of them, and what each holds
    POST   /v1/admin/engines               start more
    PATCH  /v1/admin/engines/{id}          change its role
    POST   /v1/admin/engines/{id}/drain    send it no more prompts; it ends when it holds nothing
    POST   /v1/admin/engines/{id}/move     have others continue some of its requests; it goes on itself
    DELETE /v1/admin/engines/{id}          drain it, but other engines continue its requests at once

What must always hold: changes are only begun here, and the list shows how far they are; nothing waits between a
question to the desk and the change that depends on its answer; a body is read before anything is changed.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import attrs
import orjson
from quart import Response, request
from quart_trio import QuartTrio

from quipu.actors.config.engine_roles import EngineRole, RolesRefused
from quipu.actors.config.runtime_config import MAX_ENGINES
from quipu.actors.request_desk.health import CannotMove, DrainMode, EngineState, EngineStatus, LastEngine
from quipu.actors.request_desk.interface import Desk

from ...request.errors import APIError, bad_value, no_engines, not_found
from ...request.request_context import current_request_context
from ..bodies import take_body
from ..body_field import Shape
from ..fields import Fields, missing, parse_object
from ..ignored_fields import ignored_fields
from ..operation import route
from ..query import Parameters, listed
from .admin_schemas import (
    ADD_ENGINES,
    ADDED,
    CHANGE_ENGINE,
    CHANGED,
    DRAIN_ENGINE,
    DRAINED,
    LIST_ENGINES,
    MOVE_SEQUENCES,
    MOVED,
    REMOVE_ENGINE,
)
from .routes import describe_upstreams

_ENGINE_ID = re.compile(r"0|[1-9][0-9]{0,14}")


def install_engines(app: QuartTrio, desk: Desk) -> None:
    """Register the routes. `web/auth/auth.py` decides who may use them."""

    @route(app, "GET /v1/admin/engines", LIST_ENGINES)
    async def list_engines() -> Response:
        engines = [describe_status(status) for status in desk.engines()]
        return _answer({"engines": engines, "upstreams": describe_upstreams(desk)}, HTTPStatus.OK)

    @route(app, "POST /v1/admin/engines", ADD_ENGINES)
    async def add_engines() -> Response:
        fields = await _read_fields(ADDED)
        if not desk.info.has_engines:
            raise no_engines()
        count, role = fields.integer("count") or 1, _read_role(fields) or EngineRole.MIXED
        num_engines = len(desk.engines())
        if num_engines + count > MAX_ENGINES:
            raise bad_value("count", f"a server has at most {MAX_ENGINES} engines, and this one has {num_engines}")
        try:
            return _answer({"ids": desk.control.add(count, role)})
        except RolesRefused as error:
            raise _roles_refused(error) from None

    @route(app, "PATCH /v1/admin/engines/<engine_id>", CHANGE_ENGINE)
    async def change_engine(engine_id: str) -> Response:
        fields = await _read_fields(CHANGED)
        if (role := _read_role(fields)) is None:
            raise missing("role")
        try:
            status = _status_of(desk, engine_id)
            desk.control.set_role(status.engine_id, role)
        except RolesRefused as error:
            raise _roles_refused(error) from None
        return _answer(describe_status(_find(desk, status.engine_id) or status), HTTPStatus.OK)

    @route(app, "POST /v1/admin/engines/<engine_id>/drain", DRAIN_ENGINE)
    async def drain_engine(engine_id: str) -> Response:
        fields = await _read_fields(DRAINED)
        mode, timeout_s = _read_mode(fields), fields.number("timeout_s")
        return _drain(desk, engine_id, mode, timeout_s)

    @route(app, "POST /v1/admin/engines/<engine_id>/move", MOVE_SEQUENCES)
    async def move_sequences(engine_id: str) -> Response:
        fields = await _read_fields(MOVED)
        if (count := fields.integer("count")) is None:
            raise missing("count")
        source, target_id = _status_of(desk, engine_id), fields.integer("to")
        try:
            num_moved = desk.control.move(source.engine_id, count, target_id)
        except CannotMove as error:
            raise APIError(
                HTTPStatus.CONFLICT, str(error), "invalid_request_error", param="to", code="no_target"
            ) from None
        return _answer({"id": source.engine_id, "count": num_moved})

    @route(app, "DELETE /v1/admin/engines/<engine_id>", REMOVE_ENGINE)
    async def remove_engine(engine_id: str) -> Response:
        force = Parameters(request.args).flag("force") or False
        hint = " Add `?force=true` to remove it nevertheless: its requests then fail."
        return _drain(desk, engine_id, DrainMode.HAND_OVER, force=force, hint=hint)


def describe_status(status: EngineStatus) -> dict[str, Any]:
    return {
        "id": status.engine_id,
        "incarnation": status.incarnation,
        "role": status.role,
        "state": status.state,
        "detail": status.detail,
        "numerics": None if status.ready is None else status.ready.numerics,
        "num_running": status.num_running,
        "num_waiting": status.num_waiting,
        "blocks_used": status.blocks_used,
        "blocks_total": status.blocks_total,
        "deaths": status.deaths,
    }


def _answer(body: dict[str, Any], status: HTTPStatus = HTTPStatus.ACCEPTED) -> Response:
    return Response(orjson.dumps(body), status=status, content_type="application/json")


async def _read_fields(declared: Shape) -> Fields:
    """Return the body's fields, none if it is empty. Raises APIError; unknown fields are reported as ignored."""
    data, share = await take_body()
    body = await parse_object(data, share.grow) if data else {}
    current_request_context().ignored_fields = (await ignored_fields(body, declared)).header
    return Fields(body, declared=declared)


def _read_mode(fields: Fields) -> DrainMode:
    mode = fields.optional_text("mode")
    if mode is None:
        return DrainMode.FINISH
    if mode not in tuple(DrainMode):
        raise bad_value("mode", f"must be one of {listed(DrainMode)}")
    return DrainMode(mode)


def _read_role(fields: Fields) -> EngineRole | None:
    role = fields.optional_text("role")
    if role is None:
        return None
    if role not in tuple(EngineRole):
        raise bad_value("role", f"must be one of {listed(EngineRole)}")
    return EngineRole(role)


def _roles_refused(error: RolesRefused) -> APIError:
    return APIError(HTTPStatus.CONFLICT, f"{error}.", "invalid_request_error", param="role", code="roles_refused")


def _drain(
    desk: Desk, engine_id: str, mode: DrainMode, timeout_s: float | None = None, *, force: bool = False, hint: str = ""
) -> Response:
    """Begin to end the engine that a path names. Raises APIError: 404, or 409 and `hint` if it is the last one."""
    before = _status_of(desk, engine_id)
    try:
        desk.control.drain(before.engine_id, mode, timeout_s, force=force)
    except LastEngine:
        message = f"No other engine is ready to serve requests: add one, or wait until it is.{hint}"
        raise APIError(
            HTTPStatus.CONFLICT, message, "invalid_request_error", param="engine_id", code="last_engine"
        ) from None
    gone = attrs.evolve(before, state=EngineState.DRAINING, num_running=0, num_waiting=0)
    return _answer(describe_status(_find(desk, before.engine_id) or gone))


def _status_of(desk: Desk, engine_id: str) -> EngineStatus:
    """Return the status of the engine that a path names. Raises APIError: 404."""
    status = _find(desk, int(engine_id)) if _ENGINE_ID.fullmatch(engine_id) else None
    if status is None:
        raise not_found("No engine exists with this id.", "engine_id", "engine_not_found")
    return status


def _find(desk: Desk, engine_id: int) -> EngineStatus | None:
    return next((status for status in desk.engines() if status.engine_id == engine_id), None)
