"""The points at which an actor of a simulation can be made to crash.

A point is an actor, a type of message, and a moment: before the actor takes such a message, after it has handled one,
or before or after it sends one; or, amid its work on a message, before or after it calls something else (`CALLED`).
Which messages an actor takes is read off the types of its inbox; which it sends is in `SENT`. An actor of the web
process is restarted after a crash, one of an engine ends its engine.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import attrs

from quipu.actors.accountant.entry_store import AccountantMessage
from quipu.actors.accountant.request_entries import UpstreamMessage
from quipu.actors.detokenizer.decoder import ByteDecoder
from quipu.actors.detokenizer.text_store import DetokenizerMessage
from quipu.actors.engine.scheduler.actor import SchedulerMessage
from quipu.actors.ledger.durable_journal import DurableJournal
from quipu.actors.messages.executor import ExecutorMessage
from quipu.actors.messages.mover import MoveNews, MoverMessage
from quipu.actors.router.route_store import RouterMessage

TAKING, SENDING, CALLING = ("takes", "handled"), ("sends", "sent"), ("calls", "called")
WEB_ACTORS = ("tokenizer", "router", "detokenizer", "accountant")
TAKEN: dict[str, tuple[Any, ...]] = {
    "accountant": get_args(AccountantMessage),
    "router": get_args(RouterMessage),
    "detokenizer": get_args(DetokenizerMessage),
    "scheduler": get_args(SchedulerMessage),
    "executor": get_args(ExecutorMessage),
    "mover": get_args(MoverMessage),
    "end_moves": get_args(MoveNews),
}
NOT_SIMULATED = {message.__name__ for message in get_args(UpstreamMessage)} | {"LookUp"}
"""Messages of servers to which requests are passed on, and questions about the cache."""
SENT = {
    "tokenizer": ("Prompted", "Refused", "Track"),
    "router": ("Routed",),
    "detokenizer": ("Completed",),
    "accountant": ("Tokens",),
    "scheduler": ("Reserve", "StepPlan"),
    "block_manager": ("Granted",),
    "executor": ("StepDone", "BarrierPassed"),
    "mover": ("Barrier", "Moved", "MoveFailed"),
}


@attrs.frozen
class Call:
    """What an actor of the web process calls amid its work on a message."""

    actor: str
    owner: type
    name: str


CALLED = (
    Call("accountant", DurableJournal, "admit"),
    Call("accountant", DurableJournal, "close"),
    Call("detokenizer", ByteDecoder, "push"),
)


@attrs.frozen(order=True)
class Point:
    actor: str
    message: str
    """Its type; the name of what is called."""
    moment: str

    def __str__(self) -> str:
        return f"{self.actor} {self.moment} {self.message}"


IMPOSSIBLE = {
    Point("accountant", "Tokens", "sent"): "posting is the last thing that sending does, and the step in which the "
    "message is noted as passed on follows at once: there is nothing that could raise in between",
    Point("accountant", "close", "called"): "that the record is filed is noted in the step that follows",
}
"""Points at which no actor can crash, and why."""


@cache
def all_points() -> tuple[Point, ...]:
    """Return every point, in a fixed order."""
    taken = {actor: [message.__name__ for message in messages] for actor, messages in TAKEN.items()}
    taken["tokenizer"] = ["OpenRequest"]
    taken["block_manager"] = ["Reserve"]
    points = [
        Point(actor, message, moment)
        for actor, messages in taken.items()
        for message in messages
        for moment in TAKING
        if message not in NOT_SIMULATED
    ]
    points += [Point(actor, message, moment) for actor, sent in SENT.items() for message in sent for moment in SENDING]
    points += [Point(call.actor, call.name, moment) for call in CALLED for moment in CALLING]
    return tuple(sorted(point for point in points if point not in IMPOSSIBLE))
