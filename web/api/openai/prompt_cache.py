"""`prompt_cache_options`, `prompt_cache_retention` and `prompt_cache_breakpoint`: what of a prompt a client wants kept.

A breakpoint pins the prompt up to the end of its part, as `cache_control` does in the Messages API. With `mode:
implicit`, the default, a ttl also pins the prompt up to its last message. Everything is cached in any case, so `mode:
explicit` without breakpoints pins nothing and loses nothing.

What must always hold: at most `MAX_BREAKPOINTS` marks, the last ones, in the order of the prompt; what else was asked
for has no effect, and is in `unused`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

from quipu.actors.messages.prompts import CacheTtl, CallMark, ChatPart, ContentMark, Mark

from ...request.errors import bad_value
from ..body_shapes import BREAKPOINT
from ..fields import Fields

OPTIONS, RETENTION = "prompt_cache_options", "prompt_cache_retention"
PREWARM = f"{OPTIONS}.prewarm"
MAX_BREAKPOINTS = 4
_TTL = re.compile(r"([1-9][0-9]{0,5})([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHORTEST_S, _LONGEST_S = 300, 3600


@attrs.frozen
class CacheWishes:
    prewarm: bool
    is_explicit: bool
    ttl: CacheTtl | None
    """None: none was named."""
    named: tuple[str, ...]
    """Paths of the fields that only breakpoints give an effect."""
    unused: tuple[str, ...]


NO_WISHES = CacheWishes(prewarm=False, is_explicit=False, ttl=None, named=(), unused=())


def read_cache_wishes(fields: Fields) -> CacheWishes:
    """Read the fields of the request itself. Raises APIError."""
    options = fields.fields(OPTIONS)
    mode, ttl = options.optional_text("mode"), read_ttl(options)
    kept = CacheTtl.ONE_HOUR if fields.optional_text(RETENTION) == "24h" else None
    named = [options.param("ttl")] * (ttl is not None) + [RETENTION] * (ttl is None and kept is not None)
    unused = [RETENTION] * (ttl is not None and kept is not None)  # the ttl replaces it
    prewarm = options.flag("prewarm")
    return CacheWishes(prewarm, mode == "explicit", kept if ttl is None else ttl, tuple(named), tuple(unused))


def read_ttl(fields: Fields) -> CacheTtl | None:
    """Return the longest ttl of this server that does not exceed the field `ttl`. Raises APIError."""
    ttl, param = fields.optional_text("ttl"), fields.param("ttl")
    if ttl is None:
        return None
    found = _TTL.fullmatch(ttl)
    if found is None:
        raise bad_value(param, "must be a number and a unit, such as `5m`, `30m` or `1h`")
    seconds = int(found[1]) * _SECONDS[found[2]]
    if seconds < _SHORTEST_S:
        raise bad_value(param, "must be at least `5m`")
    return CacheTtl.ONE_HOUR if seconds >= _LONGEST_S else CacheTtl.FIVE_MINUTES


@attrs.frozen
class PartBreakpoint:
    path: str
    ttl: CacheTtl | None


def read_breakpoint(part: Fields) -> PartBreakpoint | None:
    """Return the breakpoint of a part, None if it has none. Raises APIError."""
    if part.get(BREAKPOINT) is None:
        return None
    fields = part.fields(BREAKPOINT)
    if fields.text("mode") != "explicit":
        raise bad_value(fields.param("mode"), "must be `explicit`")
    return PartBreakpoint(part.param(BREAKPOINT), read_ttl(fields))


class PartBreakpoints:
    """Collects the breakpoints of one request, in the order of its prompt."""

    def __init__(self, wishes: CacheWishes) -> None:
        self._wishes = wishes
        self._found: list[tuple[str, Mark]] = []

    def add(self, found: PartBreakpoint | None, message: int, num_chars: int) -> None:
        """Place a breakpoint, if there is one, after `num_chars` characters of a message."""
        if found is not None:
            ttl = found.ttl or self._wishes.ttl or CacheTtl.FIVE_MINUTES
            self._found.append((found.path, ContentMark(ttl, message, num_chars)))

    def marks(self, parts: Sequence[ChatPart]) -> tuple[Mark, ...]:
        end = self._end(parts)
        kept = [mark for _, mark in self._found[-self._num_kept(parts) :]]
        return (*kept, *((end,) if end is not None else ()))

    def unused(self, parts: Sequence[ChatPart]) -> tuple[str, ...]:
        """Return the paths of what has no effect."""
        dropped = [path for path, _ in self._found[: -self._num_kept(parts)]]
        pins_nothing = not self._found and self._end(parts) is None
        return (*self._wishes.unused, *(self._wishes.named if pins_nothing else ()), *dropped)

    def _num_kept(self, parts: Sequence[ChatPart]) -> int:
        return MAX_BREAKPOINTS - (self._end(parts) is not None)

    def _end(self, parts: Sequence[ChatPart]) -> Mark | None:
        """Return the mark at the end of the last part, which only a named ttl asks for."""
        wishes = self._wishes
        if wishes.is_explicit or wishes.ttl is None or not parts:
            return None
        last = parts[-1]
        if last.call is not None:
            return CallMark(wishes.ttl, last.chat_message, last.call)
        return ContentMark(wishes.ttl, last.chat_message, last.num_chars)
