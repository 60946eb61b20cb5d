"""What a client meant that asked for a URL which does not exist: the route that the rest of its path leads to.

Used by `errors.py` for its 404 and 405, which are sent only to who may use the server. What must always hold: only
routes that exist are named, and a path is tried a fixed number of times, however long it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from werkzeug.exceptions import HTTPException, MethodNotAllowed
from werkzeug.routing import Map

_PREFIXES = frozenset({"v1", "api", "openai", "anthropic"})
"""First segments that other servers have, or that a client adds to a base URL which has them already."""
_MAX_PATH = 1024
"""Characters of a path that is looked at: those of routes are shorter."""
_SPARE_METHODS = frozenset({"HEAD", "OPTIONS"})


def nearest_url(urls: Map, path: str) -> str | None:
    """Return the method and path that `path` nearly names, such as `POST /v1/chat/completions`; None without any."""
    if len(path) > _MAX_PATH:
        return None
    for candidate in _candidates(path):
        if candidate != path and (methods := methods_of(urls, candidate)):
            return f"{methods} {candidate}"
    return None


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
