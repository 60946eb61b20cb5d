"""Checks of a request's head beyond those of h11: nothing that a proxy in front may have read differently.

Called by `http11.py` with the received bytes and h11's events.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import h11

_HEAD_END = b"\r\n\r\n"
_BAD_LINE_END = re.compile(rb"(?<!\r)\n|\n[ \t]")
"""A bare line feed or a folded line. h11 accepts both; a proxy in front may see other headers than we do."""


class RefusedRequest(Exception):
    """A request that is answered with `status`, and its connection closed."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def origin_form(request: h11.Request) -> bytes:
    """Return the request's target as `/path?query`, or `*`.

    Stock Hypercorn switches to HTTP/2 on `PRI * HTTP/2.0`, and passes on targets that raise in the application, such as
    `http://[::1`. Raises RefusedRequest.
    """
    if request.http_version not in (b"1.0", b"1.1"):
        raise RefusedRequest(505)
    target = request.target
    if target.startswith(b"/") or (target == b"*" and request.method == b"OPTIONS"):
        return target
    try:
        parts = urlsplit(target)
    except ValueError:
        raise RefusedRequest(400) from None
    if parts.scheme not in (b"http", b"https") or not parts.netloc:
        raise RefusedRequest(400)
    return (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")


def check_framing(request: h11.Request) -> None:
    """Refuse a request that declares its body's length in two ways, of which a proxy may have used the other.

    RFC 9112, 6.1. Raises RefusedRequest.
    """
    names = {name for name, _ in request.headers}
    if b"content-length" in names and b"transfer-encoding" in names:
        raise RefusedRequest(400)


def check_trailers(end: h11.EndOfMessage, max_headers: int, max_bytes: int) -> None:
    """Refuse what follows the last chunk of a body if it is more than a head may be.

    As for heads, h11 limits only what is incomplete. Raises RefusedRequest.
    """
    if len(end.headers) > max_headers or sum(len(name) + len(value) + 4 for name, value in end.headers) > max_bytes:
        raise RefusedRequest(431)


def check_head(received: bytes, max_headers: int, max_bytes: int) -> None:
    """Refuse line ends other than CRLF, too many lines (which h11 parses at 2 us each), and a head that is too long.

    h11 limits only incomplete heads, and one read may bring four times as much. `received` begins with the request and
    may be incomplete. Raises RefusedRequest.
    """
    head, end, _ = received.partition(_HEAD_END)
    if _BAD_LINE_END.search(head):
        raise RefusedRequest(400)
    num_lines = head.count(b"\n") + bool(end)
    if num_lines - 1 > max_headers or len(head) > max_bytes:  # the first line is the request's
        raise RefusedRequest(431)
