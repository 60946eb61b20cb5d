"""What the router receives besides prompts and reports: which engines there are, and which sequences have ended."""

from __future__ import annotations

import attrs

from ..config.engine_roles import EngineRole


@attrs.frozen
class EngineUp:
    """An engine is ready, and holds no sequence."""

    engine_id: int
    incarnation: int
    num_blocks: int
    """Without the null block."""
    numerics: str
    role: EngineRole = EngineRole.MIXED
    peer_address: str = ""
    """Where other engines may fetch its blocks; empty: nowhere."""


@attrs.frozen
class RoleChanged:
    """An engine is for something else from now on. What it holds, it completes."""

    engine_id: int
    role: EngineRole


@attrs.frozen
class EngineDown:
    """An engine has died, or has ended. What is queued for it goes to others, or waits."""

    engine_id: int
    incarnation: int


@attrs.frozen
class SequenceEnded:
    """No engine holds a sequence, or will."""

    sequence_id: int


@attrs.frozen
class EngineClosing:
    """An engine is to end: it gets no more prompts, except for choices of prompts that it has."""

    engine_id: int
