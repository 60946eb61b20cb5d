"""The files of the pages, read once at start, and the headers with which they are sent.

The pages ask the API for data, with the key of their user. What must always hold: names are looked up and never opened,
so no name reaches another file; no page may run, load or send anything except from and to its own server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

import attrs
from quart import Response, request

FOLDER: Final = Path(__file__).parent / "static"
PAGE: Final = "index.html"
DOCS_PAGE: Final = "docs.html"
CONTENT_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""No inline script or style, no other site, no frame around the pages; text never becomes markup."""
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # revalidated each time, so that after an upgrade no old script meets a new server
    "Cache-Control": "no-cache",
}


@attrs.frozen
class StaticFile:
    content: bytes
    content_type: str
    etag: str
    """Of the content, without the quotes."""


@cache
def read_files(folder: Path = FOLDER) -> Mapping[str, StaticFile]:
    """Return every file below `folder` by its relative path, as it was when this was first called.

    Raises KeyError for a suffix without a content type.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            etag = hashlib.sha256(content).hexdigest()[:32]
            files[path.relative_to(folder).as_posix()] = StaticFile(content, CONTENT_TYPES[path.suffix], etag)
    return files


def send(file: StaticFile) -> Response:
    """Return the response to the current request: the file, or 304 if the browser has it."""
    if request.if_none_match.contains_weak(file.etag):
        response = Response(b"", status=304)
    else:
        response = Response(file.content, content_type=file.content_type)
    response.set_etag(file.etag)
    response.headers.update(HEADERS)
    return response
