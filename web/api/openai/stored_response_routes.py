"""The routes of `/v1/responses/{response_id}`: get, delete, cancel, and list what went in.

A response that is generated in the background is answered from memory (`background_runs.py`), every other one from the
store. One that is not in the background exists for others only when it is complete.
"""

from __future__ import annotations

from typing import Any

import trio
from quart import Response, request
from quart_trio import QuartTrio

from quipu.actors.config.declarations import RESPONSES
from quipu.actors.response_store.object_tables import ObjectTables
from quipu.actors.response_store.stored import Kind, State, StoredObject
from quipu.actors.threads import run_in_thread

from ...http.sse import json_for_line
from ...options import AppOptions
from ...request.errors import bad_value, invalid, unavailable
from ...request.request_context import current_request_context
from ..json_body import parse_json
from ..operation import route
from ..query import Parameters
from . import stored_schemas as schemas
from .background_runs import BackgroundRuns, Run
from .paging import read_page
from .response_keeper import unpacked, whole_body
from .responses import check_included
from .responses_logprobs import StoredLogprobs, has_holes
from .store_door import StoreDoor, is_stored_id, no_object, not_stored
from .stored_items import page_body
from .stream_log import MAX_LOG_BYTES, EventLog, LogBudget, log_response

ONE = f"{RESPONSES}/<response_id>"
CANCEL_S = 10.0
"""How long a cancelled response may take to end; its engine is told at once."""
_LOST = "The server that generated this response stopped before it was complete."


def install_stored_responses(app: QuartTrio, options: AppOptions, door: StoreDoor | None, runs: BackgroundRuns) -> None:
    """Register the routes. Without a `door`, they say that nothing is stored."""

    @route(app, f"GET {ONE}", schemas.RETRIEVE_RESPONSE)
    async def retrieve(response_id: str) -> Response:
        its = _Its(door, runs, response_id)
        parameters = Parameters(request.args)
        check_included(list(parameters.texts("include") or ()))
        parameters.flag("include_obfuscation")  # deltas are never padded
        after = parameters.whole("starting_after", 0, schemas.MAX_EVENT_NUMBER)
        if parameters.flag("stream"):
            return log_response(await its.log(), 0 if after is None else after + 1, options)
        if after is not None:
            raise bad_value("starting_after", "only allowed with `stream=true`")
        return Response(await its.body(), content_type="application/json")

    @route(app, f"DELETE {ONE}", schemas.DELETE_RESPONSE)
    async def delete(response_id: str) -> dict[str, Any]:
        its = _Its(door, runs, response_id)
        await its.cancel()
        await its.find()
        if not await its.door.call(ObjectTables.delete, its.tenant, Kind.RESPONSE, response_id):
            raise no_object(Kind.RESPONSE, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @route(app, f"POST {ONE}/cancel", schemas.CANCEL_RESPONSE)
    async def cancel(response_id: str) -> Response:
        its = _Its(door, runs, response_id)
        if not await its.cancel() and not (await its.find()).is_background:
            message = "Only responses that were created with `background` true can be cancelled."
            raise invalid(message, "response_id", "not_in_background")
        return Response(await its.body(), content_type="application/json")

    @route(app, f"GET {ONE}/input_items", schemas.INPUT_ITEMS)
    async def list_input(response_id: str) -> Response:
        its = _Its(door, runs, response_id)
        await its.find()
        page = await read_page(its.door, its.tenant, Kind.RESPONSE, response_id)
        return Response(page_body(page), content_type="application/json")


class _Its:
    """One response, for the tenant of the current request."""

    def __init__(self, door: StoreDoor | None, runs: BackgroundRuns, response_id: str) -> None:
        if door is None:
            raise not_stored()
        self.door = door
        self.tenant = current_request_context().principal.tenant
        self._runs = runs
        self._id = response_id

    @property
    def _run(self) -> Run | None:
        return self._runs.find(self.tenant, self._id)

    async def find(self, *, with_output: bool = False) -> StoredObject:
        """Return what is stored. Raises APIError (404) if there is none for this tenant."""
        found: StoredObject | None = None
        if is_stored_id(self._id):
            found = await self.door.call(_find, self.tenant, self._id, with_output)
        if found is None or (found.state is State.OPEN and self._run is None):
            raise no_object(Kind.RESPONSE, self._id)
        return found

    async def body(self) -> bytes:
        run = self._run
        if run is not None:
            return run.keeper.body(is_started=run.is_started)
        found = await self.find(with_output=True)
        if found.state is State.LOST:
            head = await parse_json(found.head)
            error = {"code": "server_error", "message": _LOST, "type": "server_error", "param": None}
            return json_for_line({**head, "status": "failed", "error": error})
        return whole_body(found.head, found.output)

    async def log(self) -> EventLog:
        """Return the events of its stream. Raises APIError if it has none."""
        run = self._run
        if run is not None and run.log is not None:
            return run.log
        data = None
        if run is None and (await self.find()).has_events:
            data = await self.door.call(ObjectTables.events, self.tenant, self._id)
        if data is None:
            message = "only for responses that were created with `background` and `stream` true, and were completed"
            raise bad_value("stream", message)
        first, events = await run_in_thread(unpacked, data, MAX_LOG_BYTES)
        log = EventLog(LogBudget(), first)
        if has_holes(events):
            texts = [item.logprobs for item in (await self.find(with_output=True)).output if item.logprobs]
            log.fill = (await run_in_thread(StoredLogprobs.of, texts)).fill
        log.push(events)
        log.finish()
        return log

    async def cancel(self) -> bool:
        """End its generation and wait until its answer is known; return whether there was one."""
        run = self._run
        if run is None:
            return False
        run.cancel()
        with trio.move_on_after(CANCEL_S):
            await run.answered.wait()
            return True
        raise unavailable("The response is being cancelled, but has not ended yet. Try again later.")


def _find(tables: ObjectTables, tenant: str, response_id: str, with_output: bool) -> StoredObject | None:
    return tables.find(tenant, Kind.RESPONSE, response_id, with_output=with_output)
