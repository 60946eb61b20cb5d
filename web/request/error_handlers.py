"""Answers to whatever ends a request before its status line: an `APIError`, an exception of the desk, the router or the
body's reader, a bug. The shapes are those of `errors.py`.

A 404 or 405 says which URL its client probably meant, since other servers have theirs below other paths; it is sent
only to who may use the server. A slash too much at the end of a path is a redirect, as with FastAPI (vLLM).

What must always hold: exceptions are logged by type and stack frames, never by message, which may quote a client; only
routes that exist are named, and a path is tried a fixed number of times, however long it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus

import structlog
from quart import Response, current_app, g, request
from quart.wrappers import Request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge
from werkzeug.routing import Map

from quipu.actors.request_desk.interface import DeskClosed, PromptRefused

from ..telemetry.logs import frames_of
from .errors import APIError, from_request_error, internal, not_found, quoted, respond, unavailable
from .request_context import current_request_context

_log = structlog.get_logger("quipu.web")


def install_error_handlers(app: QuartTrio) -> None:

    @app.errorhandler(APIError)
    async def on_api_error(error: APIError) -> Response:
        return respond(error)

    @app.errorhandler(DeskClosed)
    async def on_closed(error: DeskClosed) -> Response:
        return respond(unavailable(str(error)))

    @app.errorhandler(PromptRefused)
    async def on_refused(refused: PromptRefused) -> Response:
        return respond(from_request_error(refused.error))

    @app.errorhandler(HTTPException)
    async def on_http_exception(error: HTTPException) -> Response:
        response = respond(_from_http_exception(error))
        if isinstance(error, NotFound) and (location := without_slash(current_app.url_map, request)) is not None:
            response.status_code = HTTPStatus.TEMPORARY_REDIRECT
            response.headers["Location"] = location
        if isinstance(error, MethodNotAllowed) and error.valid_methods:
            response.headers["Allow"] = ", ".join(sorted(error.valid_methods))
        if isinstance(error, RequestEntityTooLarge):
            # The rest of the body is never read, so the connection cannot carry another request.
            response.headers["Connection"] = "close"
        return response

    @app.errorhandler(Exception)
    async def on_exception(error: Exception) -> Response:
        log = current_request_context().log if "request_context" in g else _log
        log.error("request.crashed", error_type=type(error).__name__, frames=frames_of(error))
        return respond(internal())


def _from_http_exception(error: HTTPException) -> APIError:
    status = error.code or HTTPStatus.INTERNAL_SERVER_ERROR
    match status:
        case HTTPStatus.NOT_FOUND:
            meant = nearest_url(current_app.url_map, request.path)
            hint = "" if meant is None else f" Use {quoted(meant)[1:-1]} instead."
            return not_found(f"Unknown URL: {_method_and_path()}.{hint}", code="unknown_url")
        case HTTPStatus.METHOD_NOT_ALLOWED:
            methods = methods_of(current_app.url_map, request.path)
            message = f"Invalid method for URL: {_method_and_path()}." + (f" Use {methods}." if methods else "")
            return APIError(status, message, "invalid_request_error", code="bad_method")
        case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            message = (
                f"The request body is too large: this server takes up to {current_app.config['MAX_CONTENT_LENGTH']:,} "
                "bytes. Its operator may raise that with --max-body-bytes."
            )
            return APIError(status, message, "invalid_request_error", code="body_too_large")
        case HTTPStatus.REQUEST_TIMEOUT:
            message = "The request body did not arrive in time."
            return APIError(status, message, "invalid_request_error", code="body_timeout")
        case _ if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return APIError(status, f"{error.name}.", "invalid_request_error")
        case _:
            return APIError(status, f"{error.name}.", "server_error")


def _method_and_path() -> str:
    return f"{quoted(request.method)[1:-1]} {quoted(request.path)[1:-1]}"


_PREFIXES = frozenset({"v1", "api", "openai", "anthropic"})
"""First segments of other servers, or that a client adds to a base URL that has them already."""
_MAX_PATH = 1024
"""Characters: those of routes are shorter."""
_SPARE_METHODS = frozenset({"HEAD", "OPTIONS"})


def nearest_url(urls: Map, path: str) -> str | None:
    """Return the method and path that `path` nearly names, such as `POST /v1/chat/completions`; None without any."""
    if len(path) > _MAX_PATH:
        return None
    for candidate in _candidates(path):
        if candidate != path and (methods := methods_of(urls, candidate)):
            return f"{methods} {candidate}"
    return None


def without_slash(urls: Map, asked: Request) -> str | None:
    """Return where a request is to be sent whose path is a route's but for a slash at its end; None if it is not.

    A reference relative to that path, which also holds behind a proxy that has removed a prefix.
    """
    path = asked.scope.get("raw_path") or b""
    if len(path) > _MAX_PATH or not path.endswith(b"/") or path.endswith(b"//"):
        return None
    meant = path[:-1].decode("latin1")
    method = "GET" if asked.method == "HEAD" else asked.method
    if method not in methods_of(urls, meant).split(" or "):
        return None
    query = asked.query_string.decode("latin1")
    return f"../{meant.rpartition('/')[2]}" + (f"?{query}" if query else "")


def methods_of(urls: Map, path: str) -> str:
    """Return the methods that a path has, as a sentence names them; empty if it does not exist."""
    try:
        # no route has this method, so that every route that has the path says which it has instead
        urls.bind("localhost").match(path, method="PROPFIND")
    except MethodNotAllowed as error:
        return " or ".join(sorted(set(error.valid_methods or ()) - _SPARE_METHODS))
    except HTTPException:
        pass
    return ""


def _candidates(path: str) -> Iterator[str]:
    segments = [segment for segment in path.split("/") if segment]
    while segments and segments[0].lower() in _PREFIXES:
        segments = segments[1:]
    for rest in (segments, [segment.lower() for segment in segments]):
        if rest:
            yield "/v1/" + "/".join(rest)
            yield "/" + "/".join(rest)
