"""What a web process and its Ray driver say to each other, one JSON object a line (`ray_link.py`, `ray_driver.py`)."""

from __future__ import annotations

import msgspec

from .orders import Ending, EngineOrder


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first line: which cluster to join, and for how many engines to set resources aside in it."""

    address: str | None
    model: str
    model_path: str
    """The checkpoint that engines serve: what the operator called it, and its folder on this machine."""
    ships_weights: bool
    resources: dict[str, float] | None
    strategy: str
    num_engines: int


class Start(msgspec.Struct, frozen=True, tag=True):
    order: EngineOrder


class End(msgspec.Struct, frozen=True, tag=True):
    """Tell a process to end."""

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
