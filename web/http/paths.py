"""Matching of a request's path as it was sent.

The fixed parts of a route match byte for byte: `//metrics`, `/%6detrics` and `/v1//models` are unknown URLs, since a
proxy that filters by path compares what was sent. The variable parts (an id, a model name) may be percent-encoded.
"""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import quote, unquote

from quart.routing import QuartMap
from quart.wrappers.base import BaseRequestWebsocket
from werkzeug.routing import MapAdapter, PathConverter, UnicodeConverter

_HOST = "localhost"


class _EncodedText(UnicodeConverter):
    def to_python(self, value: str) -> str:
        return unquote(value)


class _EncodedPath(PathConverter):
    def to_python(self, value: str) -> str:
        return unquote(value)


class SentPathMap(QuartMap):
    """The URL map of an application: matches the path of the request line. Nothing is merged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.merge_slashes = False
        self.converters |= {"default": _EncodedText, "string": _EncodedText, "path": _EncodedPath}

    def bind_to_request(
        self, request: BaseRequestWebsocket, subdomain: str | None, server_name: str | None
    ) -> MapAdapter:
        sent = cast(bytes | None, request.scope.get("raw_path"))  # optional in ASGI
        path = quote(request.path) if sent is None else sent.decode("utf-8", "replace")
        if path.startswith("//"):
            path = f"/%2F{path[2:]}"  # werkzeug drops all leading slashes
        # No route depends on the host name, and Quart fails on one that is not a domain name.
        return self.bind(
            _HOST, request.root_path, None, request.scheme, request.method, path, request.query_string.decode()
        )
