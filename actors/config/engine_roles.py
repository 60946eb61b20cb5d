"""What engines are for, where prompts are computed on some and outputs on others.

Used by the settings, the engine pool, the router and the endpoints for operators. Synchronous. A role is a preference
of the router's: every engine can do everything, and does so while no other can.

    prefill    computes prompts, and leaves the sequences to another engine with their first token
    decode     continues them; it also computes what little is missing of a prompt that it has cached
    mixed      both, as every engine of a server without roles
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class EngineRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def may_prefill(self) -> bool:
        """Whether prompts are sent to it to be computed."""
        return self is not EngineRole.DECODE

    @property
    def may_decode(self) -> bool:
        """Whether sequences are sent to it that have their prompt computed elsewhere."""
        return self is not EngineRole.PREFILL


class RolesRefused(Exception):
    """Engines of this server cannot have roles, because of its other settings. Answer 409."""


def are_apart(roles: Iterable[EngineRole]) -> bool:
    """Return whether any engine does not do everything."""
    return any(role is not EngineRole.MIXED for role in roles)


def why_no_roles(*, resumes: bool, autoscales: bool) -> str | None:
    """Return why engines of a server cannot have roles; None if they can.

    `resumes`: requests go on where their engine ends them. `autoscales`: the number of engines follows the load.
    """
    if not resumes:
        return "--engines with roles needs --on-engine-death resume"
    if autoscales:
        return "--engines with roles cannot be scaled automatically (--min-engines, --max-engines)"
    return None
