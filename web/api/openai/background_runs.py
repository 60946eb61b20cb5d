"""Background responses: generated whether or not their clients wait, and found by id until they are stored.

A run has a scope and a context of its own, which outlive the HTTP request that began it. All runs end with the store.

What must always hold: a run ends as exactly one of completed, incomplete, failed and cancelled, and is found under its
id before and after; a tenant has at most `max_of_tenant` of them; no error of a run reaches another task.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import attrs
import structlog
import trio

from quipu.actors.messages.handler import Closed, OutletEvent, Started
from quipu.actors.request_desk.interface import DeskClosed, Ticket

from ...http.scope import Releases, RequestScope
from ...request.errors import APIError, internal, unavailable
from ...request.request_context import RequestContext
from ...request.tally import Tally
from ...telemetry.logs import frames_of
from ..keeping import Open
from ..stream import StreamWriter, Transcript
from .stream_log import EventLog, LogBudget

_log = structlog.get_logger("quipu.web")

MAX_RUNS = 1024
"""Of all tenants together."""


class RunKeeper(Protocol):
    """Who stores a run."""

    def transcript(self) -> Transcript:
        """Return what collects its answer."""

    def writer(self, log: EventLog, tally: Tally, logger: Any) -> StreamWriter:
        """Return the writer of its stream, whose events go into `log`."""

    def fail(self, error: APIError) -> None:
        """Note why the request could not be started."""

    def write_end(self, writer: StreamWriter, closed: Closed, *, is_cancelled: bool) -> None:
        """Write the last events of its stream."""

    async def end_run(
        self, transcript: Transcript, closed: Closed, log: EventLog | None, *, is_cancelled: bool
    ) -> bool:
        """Store the answer; return whether that is over. If it is not, `store_again` is called later. Never raises."""

    async def store_again(self) -> bool: ...

    def body(self, *, is_started: bool) -> bytes:
        """Return the newest version of the response."""

    def discard(self) -> None:
        """Forget the run, which crashed."""


class Run:
    """One background response, until it is stored."""

    def __init__(
        self, runs: BackgroundRuns, response_id: str, tenant: str, keeper: RunKeeper, *, is_streamed: bool
    ) -> None:
        self.response_id = response_id
        self.tenant = tenant
        self.keeper = keeper
        self.log = EventLog(runs.budget) if is_streamed else None
        """The events of its stream, if it has one."""
        self.is_started = False
        """An engine has begun."""
        self.is_cancelled = False
        self.answered = trio.Event()
        """Set when its answer is known, and stored unless the store fails."""
        self.is_stored = False
        self._runs = runs
        self._ticket: Ticket | None = None
        self._transcript = keeper.transcript()
        self._writer: StreamWriter | None = None

    def cancel(self) -> None:
        """End the generation within a step. Does nothing if it has ended."""
        if self._ticket is not None and self._transcript.closed is None:
            self.is_cancelled = True
            self._ticket.leave()

    async def run(
        self,
        open_in: Open,
        context: RequestContext,
        task_status: trio.TaskStatus[APIError | DeskClosed | None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Generate, and store the answer. Starts with why the request cannot be opened, or with None."""
        try:
            refusal = await self._run(open_in, context, task_status)
            if refusal is not None:
                task_status.started(refusal)
        except Exception as error:
            self._log_crash(error)
            self.keeper.discard()
        finally:
            self._ticket = None
            self._show_end()
            if self.log is not None:
                self.log.forget()
            self._runs.forget(self)

    async def _run(
        self, open_in: Open, context: RequestContext, task_status: trio.TaskStatus[APIError | DeskClosed | None]
    ) -> APIError | DeskClosed | None:
        with Releases() as releases:
            async with trio.open_nursery() as nursery:
                scope = RequestScope(nursery, releases)
                releases.push(scope.forget)
                own = context.detached(scope)
                try:
                    self._runs.check_room(self.tenant)
                    ticket = self._ticket = open_in(own)
                except (APIError, DeskClosed) as error:
                    return error
                scope.on_close(own.close)
                context.is_generation = False  # the line in the log, and the span, are those of the run
                if self.log is not None:
                    self._writer = self.keeper.writer(self.log, own.tally, own.log)
                    nursery.start_soon(self.log.make)
                ticket.mailbox.attach(self._consume)
                self._runs.add(self)
                task_status.started(None)
                del open_in  # with the prompts, of which the tokenizer has its own
                await self._start(ticket)
                await self._end(await self._transcript.wait_closed())
                nursery.cancel_scope.cancel()
        while not self.is_stored:
            self.is_stored = await self.keeper.store_again()
        return None

    async def _start(self, ticket: Ticket) -> None:
        try:
            await ticket.start()
        except DeskClosed as error:
            self.keeper.fail(unavailable(str(error)))
            ticket.leave()
        except Exception as error:
            self._log_crash(error)
            self.keeper.fail(internal())
            ticket.leave()

    def _consume(self, events: list[OutletEvent]) -> None:
        self._transcript.consume(events)
        self.is_started = self.is_started or isinstance(events[0], Started)
        before = events[:-1] if isinstance(events[-1], Closed) else events
        if self._writer is not None and before:
            self._writer.consume(before)

    async def _end(self, closed: Closed) -> None:
        """Store the answer, and show the last events when it is stored."""
        if self._writer is not None and self.log is not None:
            await self.log.wait_made()
            self.log.hold()
            self.keeper.write_end(self._writer, closed, is_cancelled=self.is_cancelled)
            await self.log.wait_made()
        end = self.keeper.end_run(self._transcript, closed, self.log, is_cancelled=self.is_cancelled)
        self.is_stored = await end
        self._show_end()

    def _log_crash(self, error: Exception) -> None:
        _log.error("background_response.crashed", error_type=type(error).__name__, frames=frames_of(error))

    def _show_end(self) -> None:
        if self.log is not None:
            self.log.finish()
            self.log.release_held()
        self.answered.set()


@attrs.define(eq=False)
class BackgroundRuns:
    """All runs of this server."""

    max_of_tenant: int
    budget: LogBudget = attrs.field(factory=LogBudget)
    _runs: dict[str, Run] = attrs.field(factory=dict)
    _by_tenant: Counter[str] = attrs.field(factory=Counter)

    def __len__(self) -> int:
        return len(self._runs)

    def check_room(self, tenant: str) -> None:
        """Raise APIError if a tenant, or all together, have too many."""
        if self._by_tenant[tenant] >= self.max_of_tenant:
            message = f"{self.max_of_tenant} of your background responses are being generated. Try again later."
            raise unavailable(message, "too_many_background_responses")
        if len(self._runs) >= MAX_RUNS:
            raise unavailable("Too many background responses are being generated. Try again later.")

    def add(self, run: Run) -> None:
        self._runs[run.response_id] = run
        self._by_tenant[run.tenant] += 1

    def find(self, tenant: str, response_id: str) -> Run | None:
        """Return a tenant's run, unless it is stored."""
        run = self._runs.get(response_id)
        return run if run is not None and run.tenant == tenant and not run.is_stored else None

    def forget(self, run: Run) -> None:
        if self._runs.pop(run.response_id, None) is not None:
            self._by_tenant[run.tenant] -= 1
            if not self._by_tenant[run.tenant]:
                del self._by_tenant[run.tenant]
