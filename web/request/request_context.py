"""One HTTP request as the web layer knows it: its id, its logger, how it ended.

A `RequestContext` is created before anything else happens to a request. Its last log line (`request.done`) is written
exactly once, however the request ends: by its scope, or when its account closes if that is later, since the numbers are
the record's. Handlers store what they learn on it.

What must always hold: the server's own id names the request; a client's id is echoed and logged, but is never a key. No
prompt, token id or generated text is ever passed to a logger.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import attrs
import structlog
import trio
from quart import Response, g, request
from quart_trio import QuartTrio

from quipu.actors.messages.handler import Closed
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.interface import Desk
from quipu.actors.request_desk.mailbox import Mailbox

from ..http.connection import Connection
from ..http.scope import RequestScope, request_scope
from ..http.sse import Sink
from ..telemetry.answer_counts import UNKNOWN, AnswerCounts
from ..telemetry.tracing import Refusal, TracedRequest, Tracer
from .batch_line import LineRequest, current_line
from .principal import Principal
from .tally import Tally

MAX_CLIENT_REQUEST_ID_CHARS = 256
IGNORED_FIELDS_HEADER = "X-Quipu-Ignored-Fields"
"""Names the fields of the body that were ignored (`api/ignored_fields.py`)."""

_log = structlog.get_logger("quipu.web")


@attrs.define(eq=False)
class RequestContext:
    request_id: str
    client_request_id: str | None
    endpoint: str
    scope: RequestScope
    connection: Connection | None
    """None under another ASGI server, and in tests."""
    log: Any
    """A logger with both ids bound."""
    opened_at: float
    traced: TracedRequest
    """What its span shows."""
    tracer: Tracer
    line: LineRequest | None = None
    """The line of a batch that it is; None: a client has sent it."""
    is_generation: bool = False
    """It asks for generated tokens, so its closing line is logged at info level."""
    status: int | None = None
    """Status of the response, once known."""
    error_code: str | None = None
    error_param: str | None = None
    ignored_fields: Callable[[], str | None] = lambda: None
    """Returns the value of the response header `IGNORED_FIELDS_HEADER`."""
    tally: Tally = attrs.field(factory=Tally)
    mailbox: Mailbox | None = None
    sink: Sink | None = None
    _principal: Principal | None = None
    _ended_at: float | None = None

    @property
    def principal(self) -> Principal:
        """On whose behalf the request is served. Raises LookupError before authentication."""
        if self._principal is None:
            raise LookupError("the request has not been authenticated")
        return self._principal

    @principal.setter
    def principal(self, principal: Principal) -> None:
        self._principal = principal

    def detached(self, scope: RequestScope) -> RequestContext:
        """Return the context of what this request has begun and does not wait for, in a scope of its own."""
        return attrs.evolve(self, scope=scope, connection=None, tally=Tally(), is_generation=True)

    def cut(self) -> None:
        """End the request of a client that does not read. May be called from any task."""
        if self.connection is not None:
            # A write that waits for this client is shielded: before its deadline only closing the socket wakes it.
            self.connection.abort()
        self.scope.cancel()

    def account_closed(self, traced: TracedRequest, closed: Closed) -> None:
        """Trace the request, and log it if it has ended: its account may close long after."""
        self.tracer.record(traced, closed)
        if self._ended_at is not None:
            self._write_line(self._ended_at, closed.record)

    def close(self) -> None:
        """Write the closing line, or leave that to `account_closed`. The scope calls this last."""
        now = self._ended_at = trio.current_time()
        if self.mailbox is None:
            self._write_line(now, self.tally)
            if self.is_generation:
                unix_s = time.time()
                began = unix_s - (now - self.opened_at)
                self.tracer.refuse(self.traced, Refusal(self.status, self.error_code, began, unix_s))
        elif self.mailbox.closed is not None:
            self._write_line(now, self.mailbox.closed.record)

    def _write_line(self, ended_at: float, usage: UsageRecord | Tally) -> None:
        write = self.log.info if self.is_generation else self.log.debug
        misses = usage.cache_misses if isinstance(usage, UsageRecord) else ()
        # The first prompt's, as in the record that `GET /v1/usage/{request_id}` shows.
        reason, token = (misses[0].reason.value, misses[0].token) if misses else (None, None)
        is_unsaid = isinstance(usage, UsageRecord) and not usage.knows_completion
        write(
            "request.done",
            endpoint=self.endpoint,
            status=self.status,
            outcome=str(self._outcome()),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=None if is_unsaid else usage.completion_tokens,
            miss_reason=reason,
            miss_token=token,
            engine=usage.engine if isinstance(usage, UsageRecord) else None,
            duration_s=round(ended_at - self.opened_at, 6),
            **self._reasons(),
        )

    def _outcome(self) -> Outcome:
        if self.mailbox is not None and self.mailbox.closed is not None:
            outcome = self.mailbox.closed.record.outcome
            # To the account, a crashed handler is a client that disconnects.
            crashed = outcome is Outcome.CANCELLED and self.status == HTTPStatus.INTERNAL_SERVER_ERROR
            return Outcome.FAILED if crashed else outcome
        if self.status is None:
            return Outcome.CANCELLED
        if self.status < HTTPStatus.BAD_REQUEST:
            return Outcome.FINISHED
        if self.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            return Outcome.FAILED
        return Outcome.REJECTED

    def _reasons(self) -> dict[str, object]:
        overflowed = True if self.sink is not None and self.sink.overflowed else None
        reasons = {"error_code": self.error_code, "error_param": self.error_param, "sink_overflowed": overflowed}
        return {name: value for name, value in reasons.items() if value is not None}


def current_request_context() -> RequestContext:
    """Return the context of the request that is being handled."""
    return cast(RequestContext, g.request_context)


def note_error(code: str | None, param: str | None) -> None:
    """Note why the current request was refused or failed, for its closing line."""
    if "request_context" in g:
        context = current_request_context()
        context.error_code, context.error_param = code, param


def install_request_contexts(app: QuartTrio, desk: Desk, tracer: Tracer, answers: AnswerCounts) -> None:
    """Create a context for every request of `app`, send its ids with every response, and count that in `answers`."""

    @app.before_request
    async def open_context() -> None:
        client_id = _usable_client_id(request.headers.get("X-Request-Id"))
        request_id = desk.new_request_id()
        ids = {"request_id": request_id} | ({} if client_id is None else {"client_request_id": client_id})
        scope = request_scope()
        # The route, not the path: what a client writes there does not belong in a log.
        endpoint, method = request.url_rule.rule if request.url_rule is not None else UNKNOWN, request.method
        asgi = cast(dict[str, Any], request.scope)
        connection, server = asgi.get("state", {}).get("connection"), asgi.get("server")
        parent = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
        context = RequestContext(
            request_id=request_id,
            client_request_id=client_id,
            endpoint=endpoint,
            scope=scope,
            connection=connection if isinstance(connection, Connection) else None,
            log=_log.bind(**ids),
            opened_at=trio.current_time(),
            traced=TracedRequest(endpoint, parent, server if server and server[1] is not None else None, request_id),
            tracer=tracer,
            line=current_line(),
        )
        scope.on_close(context.close)
        if context.line is None:
            scope.on_close(lambda: answers.add(endpoint, method, context.status))
        g.request_context = context

    @app.after_request
    async def name_response(response: Response) -> Response:
        context = current_request_context()
        context.status = response.status_code
        response.headers["X-Request-Id"] = context.client_request_id or context.request_id
        response.headers["X-Quipu-Request-Id"] = context.request_id
        if (ignored := context.ignored_fields()) is not None:
            response.headers[IGNORED_FIELDS_HEADER] = ignored
        if request.method == "HEAD":
            # its body would be made to the end, and never sent: of a stream, while the answer is generated
            response.response = response.data_body_class(b"")
        return response


def _usable_client_id(header: str | None) -> str | None:
    """Return a client's own id if it can be echoed and logged as it is."""
    if header is None or not 0 < len(header) <= MAX_CLIENT_REQUEST_ID_CHARS:
        return None
    return header if header.isascii() and header.isprintable() else None
