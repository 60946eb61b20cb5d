"""Matching the path of a request as it was sent.

A path is one only if its fixed parts are, byte for byte: `//metrics`, `/%6detrics` and `/v1//models` are other paths,
and there is nothing at them. A proxy in front that lets some paths through and not others compares what was sent, so
nothing else may lead to the same route. What a rule leaves open (an id, the name of a model) may be percent-encoded.
"""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import quote, unquote

from quart.routing import QuartMap
from quart.wrappers.base import BaseRequestWebsocket
from werkzeug.routing import MapAdapter, PathConverter, UnicodeConverter

_HOST = "localhost"


class _EncodedText(UnicodeConverter):
    """One segment, decoded once it has matched."""

    def to_python(self, value: str) -> str:
        return unquote(value)


class _EncodedPath(PathConverter):
    """The rest of a path, likewise."""

    def to_python(self, value: str) -> str:
        return unquote(value)


class SentPathMap(QuartMap):
    """The URL map of an application: matches what stood in the request line. Nothing is merged or redirected."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.merge_slashes = False
        self.converters |= {"default": _EncodedText, "string": _EncodedText, "path": _EncodedPath}

    def bind_to_request(
        self, request: BaseRequestWebsocket, subdomain: str | None, server_name: str | None
    ) -> MapAdapter:
        sent = cast(bytes | None, request.scope.get("raw_path"))  # a server need not give it
        path = quote(request.path) if sent is None else sent.decode("utf-8", "replace")
        if path.startswith("//"):
            path = f"/%2F{path[2:]}"  # werkzeug drops the slashes with which a path begins, however many
        # No route depends on the name that a client calls us by, and Quart fails on one that is no domain name.
        return self.bind(
            _HOST, request.root_path, None, request.scheme, request.method, path, request.query_string.decode()
        )
