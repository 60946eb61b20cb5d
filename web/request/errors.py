"""Errors as clients see them: one exception for handlers to raise, and the JSON shape of the API that was called.

`error_handlers.py` makes an `APIError` of everything else by which a request fails before its status line. The shape is
OpenAI's, `{"error": {"message", "type", "param", "code"}}`, or Anthropic's on the paths of its API:
`{"type": "error", "error": {"type", "message"}, "request_id"}`. Messages follow OpenAI's wording, with field names in
backticks. They may quote a client, so they are never logged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from quart import Response, g, request

from quipu.actors.messages.handler import Closed
from quipu.actors.messages.outcomes import ErrorKind, Outcome, RequestError

from .request_context import current_request_context, note_error

RETRY_AFTER_S = 1
"""Sent as `Retry-After`; a restart of the engine takes about as long."""

MAX_QUOTED = 200
"""Characters of a client's input that a message to it may quote."""
MAX_NAMED = 8
"""Models that a message names."""


class APIError(Exception):
    """Raised by a handler to end its request with this status and body. The message is for the client only."""

    def __init__(
        self,
        status: int,
        message: str,
        error_type: str,
        *,
        param: str | None = None,
        code: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """`details`: what Anthropic's clients read besides the message."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_type = error_type
        self.param = param
        self.code = code
        self.details = details

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def anthropic_body(self, request_id: str | None) -> bytes:
        error: dict[str, Any] = {"type": anthropic_type(self.status), "message": self.message}
        if self.details is not None:
            error["details"] = self.details
        return orjson.dumps({"type": "error", "error": error, "request_id": request_id})

    def response(self) -> Response:
        if speaks_anthropic():
            status = ANTHROPIC_OVERLOADED if self.status == HTTPStatus.SERVICE_UNAVAILABLE else self.status
            request_id = current_request_context().request_id if "request_context" in g else None
            response = Response(self.anthropic_body(request_id), status=int(status), content_type="application/json")
        else:
            response = Response(self.body(), status=self.status, content_type="application/json")
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
        return response


ANTHROPIC_OVERLOADED = 529
"""Anthropic's status for temporary overload, which its clients retry."""
_ANTHROPIC_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


_ANTHROPIC_TREES = ("/v1/messages/", "/v1/organizations/")
_SHARED_PATH = "/v1/models"
"""The path, with everything below it, that both APIs have."""


def anthropic_type(status: int) -> str:
    """Return Anthropic's error type for a status."""
    other = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    return _ANTHROPIC_TYPES.get(status, other)


def is_shared_path(path: str) -> bool:
    """Return whether both APIs have a path."""
    return path == _SHARED_PATH or path.startswith(f"{_SHARED_PATH}/")


def is_anthropic_path(path: str) -> bool:
    """Return whether only Anthropic's API has a path."""
    return path == "/v1/messages" or path.startswith(_ANTHROPIC_TREES)


def speaks_anthropic() -> bool:
    """Return whether the current request is answered in Anthropic's shape.

    Its path decides; on a path that both APIs have, the presence of the header `anthropic-version`.
    """
    if is_shared_path(request.path):
        return "anthropic-version" in request.headers
    return is_anthropic_path(request.path)


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> APIError:
    """Return an error for a request that cannot be served as it stands."""
    return APIError(HTTPStatus.BAD_REQUEST, message, "invalid_request_error", param=param, code=code)


def bad_value(param: str, problem: str, code: str = "invalid_value") -> APIError:
    """Return an error for a parameter; `problem` ends its sentence, such as "must be at least 1"."""
    return invalid(f"Invalid value for `{param}`: {problem}.", param, code)


def unsupported_parameter(param: str, instead: str | None = None) -> APIError:
    """Return an error for a parameter that this server does not implement, and that cannot be ignored."""
    return invalid(
        f"Unsupported parameter: `{param}` would change the answer and is not supported by this server.{_use(instead)}",
        param,
        "unsupported_parameter",
    )


def _use(instead: str | None) -> str:
    return "" if instead is None else f" Use `{instead}` instead."


def unsupported_value(param: str, problem: str) -> APIError:
    """Return an error for a value that the API defines but this server does not implement."""
    return invalid(f"Unsupported value for `{param}`: {problem}.", param, "unsupported_value")


def no_streams() -> APIError:
    """Return the error for a line of a batch that asks for a stream."""
    return unsupported_value("stream", "the answers of a batch are not streamed")


def unknown_parameter(param: str, instead: str | None = None) -> APIError:
    """Return an error for a parameter that this endpoint does not have."""
    return invalid(
        f"Unknown parameter: `{param}` is not a parameter of this endpoint.{_use(instead)}", param, "unknown_parameter"
    )


def not_found(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(HTTPStatus.NOT_FOUND, message, "invalid_request_error", param=param, code=code)


def no_model(name: str, served: Sequence[str]) -> APIError:
    """Return the error for a model that is not among those `served`, which the client may read at `/v1/models`."""
    names = ", ".join(map(quoted, served[:MAX_NAMED]))
    more = f" and {len(served) - MAX_NAMED} more (GET /v1/models)" if len(served) > MAX_NAMED else ""
    hint = f" Served here: {names}{more}." if served else ""
    return not_found(f"The model {quoted(name)} does not exist.{hint}", "model", "model_not_found")


def quoted(text: str) -> str:
    """Return a client's input as a message may quote it: unprintable characters are escaped, long input is cut."""
    shown = "".join(
        char if char.isprintable() and char not in '"\\' else json.dumps(char)[1:-1] for char in text[:MAX_QUOTED]
    )
    return f'"{shown}"' if len(text) <= MAX_QUOTED else f'"{shown}…"'


def unavailable(message: str, code: str = "overloaded") -> APIError:
    """Return an error for a request that may succeed later."""
    return APIError(HTTPStatus.SERVICE_UNAVAILABLE, message, "service_unavailable", code=code)


def internal(message: str = "The server had an error while processing the request.") -> APIError:
    return APIError(HTTPStatus.INTERNAL_SERVER_ERROR, message, "server_error", code="internal_error")


def no_engines() -> APIError:
    """Return the error for what is asked of engines on a server that has none."""
    message = "This server has no engines of its own: it passes requests on to other servers."
    return APIError(HTTPStatus.CONFLICT, message, "invalid_request_error", code="no_engines")


_BY_KIND: Mapping[ErrorKind, tuple[HTTPStatus, str, str | None]] = {
    ErrorKind.INVALID: (HTTPStatus.BAD_REQUEST, "invalid_request_error", "invalid_value"),
    ErrorKind.OVERLOADED: (HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable", "overloaded"),
    ErrorKind.TIMEOUT: (HTTPStatus.GATEWAY_TIMEOUT, "timeout_error", None),
    ErrorKind.INTERNAL: (HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "internal_error"),
    ErrorKind.UPSTREAM: (HTTPStatus.BAD_GATEWAY, "server_error", "upstream_error"),
}
"""Status, type and default code of actors' errors."""


def from_request_error(error: RequestError) -> APIError:
    """Return an actor's error as an HTTP error."""
    status, error_type, code = _BY_KIND[error.kind]
    param = error.param if error.kind is ErrorKind.INVALID else None
    return APIError(status, error.message, error_type, param=param, code=error.code or code)


def error_of(closed: Closed) -> APIError | None:
    """Return the error of a closed request for its client, None if it was served."""
    if closed.error is not None:
        return from_request_error(closed.error)
    if closed.record.outcome is not Outcome.FINISHED:
        # It was closed without a reason; the client must not take a partial response for a complete one.
        return internal(f"The request ended before its response was complete ({closed.record.outcome}).")
    return None


def raise_error_of(closed: Closed) -> None:
    """Raise the error of a closed request. Return if it was served."""
    error = error_of(closed)
    try:
        if error is not None:
            raise error
    finally:
        del error  # it refers to this frame and so to the whole request: a cycle for the garbage collector


def respond(error: APIError) -> Response:
    """Return the response to the current request, and note the error for its closing line."""
    note_error(error.code, error.param)
    return error.response()


def turn_away(error: APIError) -> Response:
    """Return the response to the current request if its body will not be read."""
    response = respond(error)
    if request.content_length or "Transfer-Encoding" in request.headers:
        # Its bytes are still to come, so the connection cannot carry another request.
        response.headers["Connection"] = "close"
    return response
