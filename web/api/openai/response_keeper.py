"""Stores one response: what it is asked, before it is generated, and its answer, before its client hears the end.

What must always hold: a response that cannot be stored is given all the same, with `store` false in its last version; a
background response, which is of no use without, is refused instead, or kept in memory until it can be stored; of a
conversation one response at a time is made.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVarTuple

import trio
from quart import Response

from quipu.actors.messages.handler import Closed
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.response_store.object_tables import ObjectTables
from quipu.actors.response_store.response_store import RETRY_S
from quipu.actors.response_store.stored import Ending, Kind, NewObject, StoredItem, StoreUnavailable
from quipu.actors.threads import run_in_thread

from ...http.sse import json_for_line
from ...options import AppOptions
from ...request.errors import APIError, invalid, quoted
from ...request.request_context import current_request_context
from ...request.tally import Tally
from ..keeping import Keeper, Open, RunApart
from ..stream import Stream, StreamWriter, Transcript
from .background_runs import BackgroundRuns, Run
from .response_state import ResponseState, previous_not_found
from .responses_reply import ResponseReply
from .responses_stream import ResponseWriter
from .store_door import StoreDoor
from .stored_items import output_items, whole_item
from .stream_log import EventLog, log_response

Ts = TypeVarTuple("Ts")

COMPRESSION = 1
"""Level: events repeat most of their bytes."""


class ResponseKeeper(Keeper):
    def __init__(
        self,
        reply: ResponseReply,
        state: ResponseState,
        items: Sequence[StoredItem],
        door: StoreDoor,
        runs: BackgroundRuns,
        options: AppOptions,
        tenant: str,
    ) -> None:
        self.tenant = tenant
        self._reply = reply
        self._state = state
        self._items = items
        self._door = door
        self._runs = runs
        self._options = options
        self._is_running = False
        self._is_begun = self._is_ending = False
        self._lock: tuple[str, str] | None = None
        """The conversation that it has locked."""
        self._error: APIError | None = None
        """Why the request could not be started."""
        self._unstored: Ending | None = None
        """An answer that has to be stored again."""

    # ------------------------------------------------------------ before

    async def begin(self) -> None:
        if self._state.is_background:
            self._runs.check_room(self.tenant)
        self._take_lock()
        if not self._state.is_stored:
            return
        state, items, self._items = self._state, self._items, ()
        new = NewObject(
            object_id=self._reply.answer_id,
            tenant=self.tenant,
            kind=Kind.RESPONSE,
            model=self._reply.wanted.model,
            created_at=self._reply.created_at,
            head=json_for_line(self._reply.versions().body("in_progress")),
            items=items,
            context=state.segments,
            is_background=state.is_background,
            is_open=True,
        )
        self._is_begun = True  # also if its client leaves meanwhile: a thread may store it all the same
        try:
            is_there = await self._door.call(ObjectTables.begin, new)
        except APIError as error:
            self._is_begun = False
            if state.is_background:
                raise
            self._give_up(error.message)
            return
        if not is_there:
            self._is_begun = False
            raise previous_not_found(state.previous or "")

    def _take_lock(self) -> None:
        conversation = self._state.conversation
        if conversation is None:
            return
        lock = (self.tenant, conversation)
        if lock in self._door.locked:
            message = f"Another response is being made in the conversation {quoted(conversation)}. Try again later."
            raise invalid(message, "conversation", "conversation_locked")
        self._door.locked.add(lock)
        self._lock = lock

    def _give_up(self, why: str) -> None:
        """Note that the response will not be stored."""
        self._is_begun = False
        self._reply.mark_unstored()
        self._door.store.note_unstored(why)

    # ------------------------------------------------------------ after

    async def end(self, transcript: Transcript, closed: Closed) -> None:
        if not self._is_begun or self._is_ending or closed.record.outcome is Outcome.CANCELLED:
            return
        self._is_ending = True
        try:
            ending = await self._ending(transcript, closed)
            await self._door.store.call(ObjectTables.end, ending)
        except StoreUnavailable as error:
            self._give_up(str(error))
            self.discard()
        except BaseException:  # its client has left
            self.discard()
            raise
        finally:
            self._release_lock()

    def drop(self) -> None:
        if self._is_running:
            return
        if self._is_begun and not self._is_ending:
            self.discard()
        if not self._is_ending:
            self._release_lock()

    def discard(self) -> None:
        self._release_lock()
        self._is_begun = False
        self._door.store.discard(self.tenant, Kind.RESPONSE, self._reply.answer_id)

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._door.locked.discard(self._lock)
            self._lock = None

    def start_soon(self, task: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        self._door.store.start_soon(task, *args)

    # ------------------------------------------------------------ in the background

    @property
    def run_apart(self) -> RunApart | None:
        return self._run_apart if self._state.is_background else None

    async def _run_apart(self, open_in: Open) -> Response:
        reply, context = self._reply, current_request_context()
        is_streamed = reply.wanted.delivery.stream
        run = Run(self._runs, reply.answer_id, self.tenant, self, is_streamed=is_streamed)
        refusal = await self._door.store.start(run.run, open_in, context)
        if refusal is not None:
            raise refusal
        self._is_running = True
        if run.log is not None:
            return log_response(run.log, 0, self._options)
        return Response(self.body(is_started=False), content_type="application/json")

    def transcript(self) -> Transcript:
        return self._reply.transcript(Tally())

    def writer(self, log: EventLog, tally: Tally, logger: Any) -> ResponseWriter:
        writer = self._reply.log_writer(Stream(log, tally, logger))
        log.fill = writer.fill
        return writer

    def fail(self, error: APIError) -> None:
        self._error = error

    def write_end(self, writer: StreamWriter, closed: Closed, *, is_cancelled: bool) -> None:
        assert isinstance(writer, ResponseWriter)
        if is_cancelled:
            writer.write_cancelled(closed.record)
        elif self._error is not None:
            writer.write_failure(self._error, closed.record)
        else:
            writer.consume([closed])

    async def end_run(
        self, transcript: Transcript, closed: Closed, log: EventLog | None, *, is_cancelled: bool
    ) -> bool:
        events = None
        if log is not None:
            events = await run_in_thread(_packed, log.first, log.joined())
        self._unstored = await self._ending(transcript, closed, events, is_cancelled=is_cancelled)
        return await self._store()

    async def store_again(self) -> bool:
        await trio.sleep(RETRY_S)
        return await self._store()

    async def _store(self) -> bool:
        assert self._unstored is not None
        try:
            await self._door.store.call(ObjectTables.end, self._unstored)
        except StoreUnavailable:
            return False
        finally:
            self._release_lock()
        self._unstored = None
        return True

    def body(self, *, is_started: bool) -> bytes:
        """Return the newest version of a background response that is not stored."""
        if self._unstored is None:
            return json_for_line(self._reply.versions().body("in_progress" if is_started else "queued"))
        return whole_body(self._unstored.head, self._unstored.items)

    # ------------------------------------------------------------ for all

    async def _ending(
        self, transcript: Transcript, closed: Closed, events: bytes | None = None, *, is_cancelled: bool = False
    ) -> Ending:
        final = self._reply.final(transcript, closed, is_cancelled=is_cancelled, error=self._error)
        is_served = final.body["status"] in ("completed", "incomplete")
        return Ending(
            object_id=self._reply.answer_id,
            tenant=self.tenant,
            head=json_for_line(final.body),
            items=await output_items(final.items, final.logprobs),
            events=events,
            conversation=self._state.conversation if is_served else None,
        )


def whole_body(head: bytes, items: Sequence[StoredItem]) -> bytes:
    """Return a stored response with its items. The head has an empty list of them."""
    return head.replace(b'"output":[]', b'"output":[' + b",".join(map(whole_item, items)) + b"]", 1)


def _packed(first: int, events: bytes) -> bytes:
    return first.to_bytes(8, "big") + zlib.compress(events, COMPRESSION)


def unpacked(data: bytes, max_bytes: int) -> tuple[int, bytes]:
    """Return the number of the first event, and all that were kept. Runs in a thread."""
    return int.from_bytes(data[:8], "big"), zlib.decompressobj().decompress(data[8:], max_bytes)
