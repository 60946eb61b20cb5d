"""What a web process and its Ray driver say to each other, one JSON object a line (`ray_link.py`, `ray_driver.py`).

An `EngineOrder` is made by `remote_host.py`, and carried out and answered with an `Ending` by a `Keeper` (`keeper.py`).
"""

from __future__ import annotations

import msgspec


class EngineOrder(msgspec.Struct, frozen=True, kw_only=True):
    """All that one engine process is started with."""

    engine_id: int
    incarnation: int
    """The first that the process will be; unique."""
    beat_s: float
    address: str
    """Where its host awaits it, `tcp://HOST:PORT`."""
    ticket: bytes
    """Secret: key and secret of its `LinkTicket`."""
    peer_secret: bytes = b""
    """Secret: what all engines of its server have, to fetch blocks from each other. Empty: it does not."""
    config: str
    environment: dict[str, str]
    """What is set beyond its node's own environment."""
    max_num_seqs: int
    module: str

    def __repr__(self) -> str:
        return f"<EngineOrder of engine {self.engine_id}, incarnation {self.incarnation}>"


class Ending(msgspec.Struct, frozen=True):
    returncode: int | None = None
    """As in `subprocess`. None: nobody saw it."""
    step_ids: tuple[int, ...] | None = None
    """The sequences of the step that it was running; None: no step, or not known."""
    reason: str = ""
    """Why nobody saw it, or why it was not started."""
    is_hopeless: bool = False
    """Another start would end the same way."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first line: which cluster to join, and for how many engines to set resources aside in it."""

    address: str | None
    model: str
    model_path: str
    """The checkpoint's folder on this machine; `model` is what the operator called it."""
    ships_weights: bool
    resources: dict[str, float] | None
    strategy: str
    num_engines: int
    gpus_each: int
    """GPUs that an engine computes on, if it computes on GPUs."""


class Start(msgspec.Struct, frozen=True, tag=True):
    order: EngineOrder


class End(msgspec.Struct, frozen=True, tag=True):
    incarnation: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill a process; if its node does not do so soon, have Ray end its keeper."""

    incarnation: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Give back what was set aside for an engine."""

    engine_id: int


Command = Join | Start | End | Kill | Forget


class Joined(msgspec.Struct, frozen=True, tag=True):
    own_host: str
    """The address by which Ray's nodes know this machine."""
    num_nodes: int
    resources: dict[str, float]
    """What is set aside for each engine."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The cluster cannot be joined. The last line."""

    reason: str


class Placed(msgspec.Struct, frozen=True, tag=True):
    """An engine has its node, where its process is about to be started."""

    incarnation: int
    node: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    incarnation: int
    ending: Ending


Event = Joined | Failed | Placed | Ended
