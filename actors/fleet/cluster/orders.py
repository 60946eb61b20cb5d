"""What an engine process on another machine is started with, and how it ended there.

Made by `remote_host.py`, carried by Ray, obeyed and answered by a `Keeper` (`keeper.py`).
"""

from __future__ import annotations

import msgspec


class EngineOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Names one engine process, and says all that it is started with."""

    engine_id: int
    incarnation: int
    """The first that the process will be. No two processes have the same."""
    beat_s: float
    address: str
    """Where its host awaits it, `tcp://HOST:PORT`."""
    ticket: bytes
    """Secret: key and secret of its `LinkTicket`."""
    config: str
    """Its `EngineConfig` as JSON."""
    environment: dict[str, str]
    """What is set beyond its node's own environment."""
    max_num_seqs: int
    module: str

    def __repr__(self) -> str:
        return f"<EngineOrder of engine {self.engine_id}, incarnation {self.incarnation}>"


class Ending(msgspec.Struct, frozen=True):
    """How an engine process ended."""

    returncode: int | None = None
    """As in `subprocess`. None: nobody saw it."""
    step_ids: tuple[int, ...] | None = None
    """The sequences of the step that it was running; None: no step, or not known."""
    reason: str = ""
    """Why nobody saw it, or why it was not started."""
    is_hopeless: bool = False
    """Another start would end the same way."""
