"""An engine process on another machine, as its host has it.

`RemoteProcess` is what the host sees, and `Nodes` is who starts it there: Ray (`ray_nodes.py`), or a test.

What must always hold: the wait for a killed process ends, even if its node is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import structlog
import trio

from ..processes.process_host import explain
from ..supervisor import Death
from .ray_messages import Ending, EngineOrder

log = structlog.get_logger()

KILL_S = 5.0
"""How long a node may take to say that a process was killed. After that it counts as ended: it cannot connect again."""


@attrs.define(eq=False)
class RemoteProcess:
    """Implements `engine_child.EngineProcess`."""

    _order: EngineOrder
    end: Callable[[], object]
    """Asks the node to end it. Like `kill`, it may be called again, and when the process has ended."""
    _kill: Callable[[], object]
    node: str | None = attrs.field(default=None, init=False)
    ending: Ending | None = attrs.field(default=None, init=False)
    _killed_at: float | None = attrs.field(default=None, init=False)
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)

    @property
    def has_ended(self) -> bool:
        return self.ending is not None

    def note_placed(self, node: str) -> None:
        self.node = node
        log.info("engine.placed", engine_id=self._order.engine_id, incarnation=self._order.incarnation, node=node)
        self._change()

    def note_ended(self, ending: Ending) -> None:
        """Note how it has ended; later reports are ignored."""
        if self.ending is None:
            self.ending = ending
            self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait(self) -> None:
        while self.ending is None:
            changed = self._changed
            deadline = float("inf") if self._killed_at is None else self._killed_at + KILL_S
            with trio.move_on_at(deadline):
                await changed.wait()
            if trio.current_time() >= deadline:
                self.note_ended(Ending(reason="its node does not answer"))

    def kill(self) -> None:
        if self._killed_at is None:
            self._killed_at = trio.current_time()
            self._kill()
            self._change()  # whoever waits does so with a deadline now

    def step_ids(self) -> tuple[int, ...] | None:
        return None if self.ending is None else self.ending.step_ids

    async def explain(self) -> Death:
        assert self.ending is not None
        if self.ending.returncode is None:
            return Death(self.ending.reason, hopeless=self.ending.is_hopeless)
        death = explain(self.ending.returncode)
        return attrs.evolve(death, reason=f"{death.reason} on node {self.node}")

    def release(self) -> None:
        """Do nothing: its node releases everything."""


class Nodes(Protocol):
    """Who starts engine processes on other machines."""

    async def join(self) -> str:
        """Return the address by which they reach this machine. Raises NotStarted if there are no nodes."""

    def start(self, order: EngineOrder) -> RemoteProcess:
        """Have an engine process started, on whichever node has room for it, as soon as there is one."""

    def forget(self, engine_id: int) -> None:
        """Give back what was set aside for an engine that has been removed."""
