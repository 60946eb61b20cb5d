"""At which point of the actors' messages each seed aims a crash, and what a server needs for the message to be sent."""

from __future__ import annotations

import random

import attrs

from tests.simulation.points import CALLING, Point, all_points

OF_SEVERAL = frozenset({"Routed", "EngineClosing"})
"""Messages that are sent only where there are several engines..."""
OF_PEERS = frozenset({"Lent", "EndMove", "HurryMove", "RoleChanged", "AnnounceKeys"})
"""...that fetch blocks from each other..."""
OF_TIERS = frozenset({"Move", "Moved", "MoveFailed", "MoveLate", "Barrier", "BarrierPassed", "ClearTier", "LoadsOver"})
"""...or where blocks are also kept on the host..."""
OF_OBJECTS = frozenset({"ListTier", "ListedPage", "ListingFailed"})
"""...or in an object store."""
OF_LEAVING = frozenset({"Unsent", "EndMove", "Abort", "Left"})
"""Messages that clients cause who leave."""
RARE = frozenset(
    {
        "Tokens",
        "Unsent",
        "EndMove",
        "HurryMove",
        "StepDropped",
        "StepFailed",
        "RoleChanged",
        "EngineClosing",
        "DropAdapter",
        "push",
        *OF_TIERS,
        *OF_OBJECTS,
    }
)
"""Messages that are not sent in every run that could, and calls of which most are like each other; more seeds aim at
them."""
TIMES_RARE = 7
CAUSES = {
    "EngineClosing": ("drain engine",),
    "EngineDied": ("kill engine",),
    "EngineDown": ("kill engine",),
    "RoleChanged": ("change role",),
    "ResetPrefixCache": ("reset cache",),
    "ClearTier": ("reset cache",),
    "StepFailed": ("fail passes",),
    "StepDropped": ("fail passes", "fail passes"),
    "MoveFailed": ("flip bit", "flip bit", "flip bit"),
    "MoveLate": ("hang copies",),
    "Unsent": ("kill engine", "kill engine", "kill engine"),
    "AnnounceKeys": ("cut wire",),
    "EndMove": ("slow copies",),
    "DropAdapter": ("reload adapter",),
    "ListTier": ("kill engine",),
    "ListedPage": ("kill engine",),
    "ListingFailed": ("object reads fail", "kill engine"),
}
"""The faults that bring a type of message about."""
AT_ONCE = frozenset({"hang copies", "slow copies", "object reads fail"})
"""Those of them that have to begin before what they disturb."""
NTH_CALLS = (1, 2, 5, 12, 30, 80)
"""Which call of a run raises: before most of them something has been done that may be lost."""
EVERY = 8
"""One seed of so many aims at no point."""


@attrs.frozen
class Aim:
    """The point at which the first fault of a seed is to be."""

    point: Point
    nth: int


def aim_of(seed: int, rng: random.Random) -> Aim | None:
    """Return where a seed aims: consecutive ones at consecutive points, so that a few hundred miss none."""
    if seed % EVERY == EVERY - 1:
        return None
    turn, points = seed - seed // EVERY, all_points()
    rare = [point for point in points if point.message in RARE]
    targets = [*points, *TIMES_RARE * rare, *points]
    point = targets[turn % len(targets)]
    if point.moment in CALLING:
        return Aim(point, rng.choice(NTH_CALLS))
    is_first = turn < len(points) or point.message in RARE
    return Aim(point, 1 if is_first else rng.choice((1, 1, 2, 5)))
