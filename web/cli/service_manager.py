"""Tells systemd, or another manager that speaks its protocol, when the server is ready, alive and stopping.

Started by `serve.py` if the manager has set NOTIFY_SOCKET. One datagram a message, as in sd_notify(3):

    READY=1      once, when the first engine can produce a token
    WATCHDOG=1   twice in each interval of WATCHDOG_USEC, as long as `/health` would answer 200
    STOPPING=1   once, when a signal to stop has arrived

What must always hold: a manager that is gone or does not read never delays the server.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, MutableMapping
from contextlib import suppress

import attrs
import trio

from quipu.actors.request_desk.health import Health

POLL_S = 0.1


@attrs.frozen
class Manager:
    """Where messages go, and how often the manager wants to hear that the server is alive."""

    address: str
    watchdog_s: float | None = None

    def send(self, message: str) -> None:
        """Send a message, unless the manager cannot take it now."""
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as link:
            link.sendto(message.encode(), address)


def find_manager(environment: MutableMapping[str, str]) -> Manager | None:
    """Return the service manager that started this process, if any; remove its variables, which children would take."""
    address = environment.pop("NOTIFY_SOCKET", "")
    interval, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
    if not address.startswith(("/", "@")):
        return None
    is_watched = interval.isdigit() and int(interval) > 0 and pid in ("", str(os.getpid()))
    return Manager(address, int(interval) / 1e6 if is_watched else None)


async def notify(manager: Manager, health: Callable[[], Health], stopping: trio.Event) -> None:
    """Keep the manager informed until cancelled."""
    is_ready = False
    is_stopping = False
    next_sign_of_life = trio.current_time()
    while True:
        state = health()
        if not is_ready and state.is_ready:
            is_ready = True
            manager.send("READY=1\nSTATUS=Serving.")
        if not is_stopping and stopping.is_set():
            is_stopping = True
            manager.send("STOPPING=1\nSTATUS=Finishing the requests that are open.")
        if manager.watchdog_s is not None and state.is_healthy and trio.current_time() >= next_sign_of_life:
            next_sign_of_life = trio.current_time() + manager.watchdog_s / 2
            manager.send("WATCHDOG=1")
        if is_stopping:
            await trio.sleep(POLL_S)
        else:
            with trio.move_on_after(POLL_S):
                await stopping.wait()  # a server without requests ends at once
