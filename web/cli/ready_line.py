"""The last line of a start: `ready: ` and the URL that a person can open, once a request would be served.

Started by `serve.py`. On a terminal it is a line of its own; a log of JSON has it as the `detail` of `server.ready`.
What must always hold: it is written once, after everything that is logged until the server is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
import trio

from quipu.actors.fleet.processes.log_format import is_for_people
from quipu.actors.fleet.processes.log_writer import LogWriter
from quipu.actors.request_desk.health import Health

from ..http.server import Address
from .service_manager import POLL_S

_OPENABLE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the addresses are shown, not listened on

log = structlog.get_logger("quipu.cli")


def url_to_open(addresses: Sequence[Address], *, serves_ui: bool) -> str:
    """Return the URL of the pages, or of the server if it has none; an address for all interfaces becomes loopback."""
    first = min(addresses, key=lambda address: ":" in address.host)  # IPv4 if there is any
    url = Address(_OPENABLE.get(first.host, first.host), first.port).url
    return f"{url}/ui" if serves_ui else url


async def announce(url: str, health: Callable[[], Health], log_writer: LogWriter) -> None:
    """Wait until the server is ready, and say where it is."""
    while True:
        if health().is_ready:
            break
        await trio.sleep(POLL_S)
    if is_for_people():
        log_writer.put(f"ready: {url}\n".encode("utf-8", "replace"))
    else:
        log.info("server.ready", url=url, detail=f"ready: {url}")
