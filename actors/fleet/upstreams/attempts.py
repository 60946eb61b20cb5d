"""One attempt to have an upstream answer a request: what its status means, and why an attempt has failed. Pure."""

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
"""Upstreams that one request is sent to at most."""
MAX_ERROR_BYTES = 64 * 1024
"""Of the body of an error."""
JSON = "application/json"
EVENT_STREAM = "text/event-stream"
OK, UNAUTHORIZED, FORBIDDEN, REQUEST_TIMEOUT, UNAVAILABLE = 200, 401, 403, 408, 503
_PLAIN = re.compile(r"[\x20-\x7e]{1,256}")
"""Headers that are passed on."""
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""For zlib, by the encoding's name."""


@attrs.frozen
class Failed:
    """An attempt that has failed on the upstream's side."""

    why: str
    """For the client: no address, no key."""
    is_overload: bool = False
    is_unreachable: bool = False
    """Nothing was heard of it: other requests would fare no better."""
    is_ours: bool = False
    """It is this server that lacks something, so that other upstreams would fare no better."""
    event: bytes | None = None
    """What it says itself, for a stream's client."""

    def error(self) -> RequestError:
        """Return what the client is told if no other upstream answers."""
        if self.is_ours:
            return RequestError(ErrorKind.OVERLOADED, f"The server cannot ask an upstream server now: {self.why}.")
        if self.is_overload:
            return RequestError(ErrorKind.OVERLOADED, f"The upstream server is overloaded: {self.why}.")
        return RequestError(ErrorKind.UPSTREAM, f"The upstream server failed: {self.why}.")


def relay_for(forward: Forward, estimate: int | None, *, is_continuous: bool) -> Relay:
    """Return what takes the response. `is_continuous`: its upstream is asked for usage in every chunk of a stream."""
    if forward.is_stream:
        return StreamRelay(forward, estimate, hides_chunk_usage=is_continuous and not forward.asks_continuous)
    return WholeRelay(forward, estimate)


def headers_for(key: str | None, request_id: str) -> dict[str, str]:
    """Return the headers of a request. None of the client's is passed on: they are for this server."""
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    return headers if key is None else {**headers, "Authorization": f"Bearer {key}"}


def failure_of_status(status: int) -> Failed | None:
    """Return why an upstream does not serve, None if its answer is the client's: a success, or a refusal."""
    if status in (UNAUTHORIZED, FORBIDDEN):
        return Failed("it does not accept this server's key")
    if status == OK or 400 <= status < 500:
        return None
    return Failed(f"it answered with status {status}", is_overload=status == UNAVAILABLE)


def check_head(forward: Forward, headers: Mapping[str, str]) -> None:
    """Check that a success is what was asked for. Raises UpstreamGarbage."""
    content_type = headers.get("content-type", "")
    if content_type.lower().startswith(EVENT_STREAM) is not forward.is_stream:
        raise UpstreamGarbage("a response of another type than was asked for")
    if _encoding_of(headers) is not None:
        raise UpstreamGarbage("a compressed response that was not asked for")


def refusal_of(status: int, headers: Mapping[str, str], body: bytes) -> UpstreamRefusal:
    """Return what the client gets of a refusal: the upstream's own words, if it can read them.

    `body`: up to one byte more than is passed on.
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
    """Return the beginning of a body that was compressed though nobody asked for it; empty if it cannot be read."""
    try:
        return zlib.decompressobj(_WINDOWS[encoding.lower()]).decompress(body, MAX_ERROR_BYTES)
    except (KeyError, zlib.error):
        return b""


def _encoding_of(headers: Mapping[str, str]) -> str | None:
    """Return the encoding of a body, None if it is as it is."""
    encoding = headers.get("content-encoding", "").strip()
    return None if encoding.lower() in ("", "identity") else encoding
