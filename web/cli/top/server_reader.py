"""Reads what a running server says about itself: one `Reading` at a time, within bounds of time and size.

What must always hold: a server that hangs, sends without end, or sends anything else than what is documented costs one
reading, and never more than `PATIENCE_S` and `MAX_BYTES`; nothing that it says reaches the terminal unchecked.
"""

from __future__ import annotations

from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Final

import attrs
import httpx2
import orjson
import trio

from ..command_output import printable
from .figures import Reading, Rows
from .metric_samples import InvalidMetrics, Samples, parse_samples

PATIENCE_S: Final = 5.0
MAX_BYTES: Final = 4 << 20
MAX_ROWS: Final = 100
"""Engines, upstreams and tenants beyond it are not shown."""
MAX_WORD: Final = 200


class NotReachable(Exception):
    """Nothing at this address answers as a server of quipu does. The message says what happened."""


class _Refused(Exception):
    """An endpoint did not answer as documented; the message says why."""


@attrs.frozen(eq=False)
class ServerReader:
    _http: httpx2.AsyncClient
    _base_url: str

    async def read(self) -> Reading:
        """Return what the server says now. Raises NotReachable."""
        try:
            with trio.fail_after(PATIENCE_S):
                return await self._read()
        except trio.TooSlowError:
            raise NotReachable(f"no answer within {PATIENCE_S:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError, ValueError) as error:
            raise NotReachable(_words(str(error) or type(error).__name__)) from error

    async def _read(self) -> Reading:
        health = await self._health()
        refusals: list[str] = []
        samples: Samples | None = None
        engines: Rows | None = None
        upstreams: Rows = ()
        tenants: Rows | None = None
        window_s = 0.0
        try:
            samples = await self._samples()
        except _Refused as refusal:
            refusals.append(str(refusal))
        now_s = trio.current_time()
        try:
            listed = await self._json("/v1/admin/engines")
            engines, upstreams = _rows(listed, "engines"), _rows(listed, "upstreams")
        except _Refused:  # the metrics, or their refusal, say enough
            pass
        try:
            stats = await self._json(f"/v1/cache/stats?limit={MAX_ROWS}")
            tenants, window_s = _rows(stats, "data"), number(stats.get("window_s"))
        except _Refused:
            pass
        return Reading(
            at_s=now_s,
            state=word(health.get("state")),
            detail=word(health.get("detail")),
            samples=samples,
            engines=engines,
            upstreams=upstreams,
            tenants=tenants,
            tenants_window_s=window_s,
            refusals=tuple(refusals),
        )

    async def _health(self) -> dict[str, Any]:
        """Return the answer of `GET /health`, which tells apart a server of quipu and anything else."""
        status, content = await self._get("/health")
        health = _object(content)
        if not isinstance(health.get("state"), str):
            raise NotReachable(f"/health is not that of quipu (status {status})")
        return health

    async def _samples(self) -> Samples:
        status, content = await self._get("/metrics")
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise _Refused("the numbers need an admin key: --api-key, or the variable QUIPU_ADMIN_KEY")
        if status != HTTPStatus.OK:
            raise _Refused(f"/metrics was answered {status}")
        try:
            return parse_samples(content.decode("utf-8", "replace"))
        except InvalidMetrics as error:
            raise _Refused(str(error)) from error

    async def _json(self, path: str) -> dict[str, Any]:
        status, content = await self._get(path)
        if status != HTTPStatus.OK:
            raise _Refused(f"{path} was answered {status}")
        return _object(content)

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises NotReachable."""
        async with self._http.stream("GET", f"{self._base_url}{path}") as response:
            if response.headers.get("content-encoding", "identity") != "identity":  # it may unpack to any size
                raise NotReachable(f"{path} is compressed, though that was not asked for")
            body = bytearray()
            async with aclosing(response.aiter_raw()) as pieces:
                async for piece in pieces:
                    body += piece
                    if len(body) > MAX_BYTES:
                        raise NotReachable(f"{path} is larger than {MAX_BYTES >> 20} MiB")
        return response.status_code, bytes(body)


def make_client(headers: dict[str, str], transport: httpx2.AsyncBaseTransport | None = None) -> httpx2.AsyncClient:
    """Return a client that follows nothing and waits for nothing of its own accord."""
    headers = {"Accept-Encoding": "identity", **headers}
    return httpx2.AsyncClient(headers=headers, timeout=None, trust_env=False, transport=transport)


def word(value: object) -> str:
    """Return what a terminal may show of a value that should be a text."""
    return _words(value) if isinstance(value, str) else ""


def number(value: object) -> float:
    """Return a value that should be a number, 0 if it is none."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    return 0.0


def _words(text: str) -> str:
    return printable(" ".join(text[: 4 * MAX_WORD].split()))[:MAX_WORD]


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _rows(answer: dict[str, Any], name: str) -> Rows:
    rows = answer.get(name)
    return tuple(row for row in rows[:MAX_ROWS] if isinstance(row, dict)) if isinstance(rows, list) else ()
