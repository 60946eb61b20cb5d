"""One attempt to have an upstream answer a request: the meaning of statuses, and the reasons for failures. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

import attrs
import msgspec

from ...messages.outcomes import ErrorKind, RequestError
from ...messages.upstream import Forward, UpstreamRefusal
from .event_stream import UpstreamGarbage
from .relay import Relay, StreamRelay, WholeRelay

MAX_ATTEMPTS = 3
"""Maximum number of upstreams that one request is sent to."""
MAX_ERROR_BYTES = 64 * 1024
"""Maximum size of an error's body."""
JSON = "application/json"
EVENT_STREAM = "text/event-stream"
OK, UNAUTHORIZED, FORBIDDEN, TOO_MANY, UNAVAILABLE = 200, 401, 403, 429, 503
_PLAIN = re.compile(r"[\x20-\x7e]{1,256}")
"""Values of headers that are forwarded."""
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Window sizes for zlib, by content encoding."""


@attrs.frozen
class Failed:
    """A failed attempt."""

    why: str
    """The reason for the client, without addresses and keys."""
    is_overload: bool = False
    is_unreachable: bool = False
    """The upstream did not respond at all, so other requests to it would fail as well."""
    is_ours: bool = False
    """This server is short of a resource, so other upstreams would fail as well."""
    event: bytes | None = None
    """The upstream's own error event, for the client of a stream."""

    def error(self) -> RequestError:
        """Return the client's error if no other upstream answers."""
        if self.is_ours:
            return RequestError(ErrorKind.OVERLOADED, f"The server cannot ask an upstream server now: {self.why}.")
        if self.is_overload:
            return RequestError(ErrorKind.OVERLOADED, f"The upstream server is overloaded: {self.why}.")
        return RequestError(ErrorKind.UPSTREAM, f"The upstream server failed: {self.why}.")


def relay_for(forward: Forward, estimate: int | None, *, is_continuous: bool) -> Relay:
    """Return the relay for the response. `is_continuous`: the upstream is asked for usage in every chunk."""
    if forward.is_stream:
        return StreamRelay(forward, estimate, hides_chunk_usage=is_continuous and not forward.asks_continuous)
    return WholeRelay(forward, estimate)


def headers_for(key: str | None, request_id: str) -> dict[str, str]:
    """Return the headers of a request. The client's headers are meant for this server and are not forwarded."""
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    return headers if key is None else {**headers, "Authorization": f"Bearer {key}"}


def failure_of_status(status: int) -> Failed | None:
    """Return the upstream's failure; None if its response is meant for the client (a success or a refusal)."""
    if status in (UNAUTHORIZED, FORBIDDEN):
        return Failed("it does not accept this server's key")
    if status == OK or 400 <= status < 500:
        return None
    return Failed(f"it answered with status {status}", is_overload=status == UNAVAILABLE)


def check_head(forward: Forward, headers: Mapping[str, str]) -> None:
    """Check that a successful response has the requested type. Raises UpstreamGarbage."""
    content_type = headers.get("content-type", "")
    if content_type.lower().startswith(EVENT_STREAM) is not forward.is_stream:
        raise UpstreamGarbage("a response of another type than was asked for")
    if _encoding_of(headers) is not None:
        raise UpstreamGarbage("a compressed response that was not asked for")


def refusal_of(status: int, headers: Mapping[str, str], body: bytes) -> UpstreamRefusal:
    """Return a refusal for the client, with the upstream's own body if the client can read it.

    `body`: at most one byte more than may be forwarded.
    """
    retry_after, encoding = headers.get("retry-after", ""), _encoding_of(headers)
    content_type = headers.get("content-type", JSON)
    if encoding is not None:
        body = _decompressed(body, encoding)
        if not body:
            message = f"The upstream server refused it with status {status}, and an explanation that cannot be read."
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": "upstream_refused"}
            body, content_type = msgspec.json.encode({"error": error}), JSON
    return UpstreamRefusal(
        status,
        body[:MAX_ERROR_BYTES],
        content_type if _PLAIN.fullmatch(content_type) else JSON,
        retry_after if _PLAIN.fullmatch(retry_after) else None,
    )


def _decompressed(body: bytes, encoding: str) -> bytes:
    """Return the beginning of a body that was compressed without being requested; empty if it cannot be read."""
    try:
        return zlib.decompressobj(_WINDOWS[encoding.lower()]).decompress(body, MAX_ERROR_BYTES)
    except (KeyError, zlib.error):
        return b""


def _encoding_of(headers: Mapping[str, str]) -> str | None:
    """Return the content encoding of a body; None if it has none."""
    encoding = headers.get("content-encoding", "").strip()
    return None if encoding.lower() in ("", "identity") else encoding
