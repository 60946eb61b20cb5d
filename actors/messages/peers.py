"""Blocks that go from one engine to another: who has them, and what is fetched before the sequence arrives.

The router says which engine holds what; the KV-block manager of the engine that needs it decides what is fetched, and
its mover asks the other engine's. No block passes through the web process.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Peer:
    """An engine from which another one may fetch blocks."""

    engine_id: int
    address: str
    """Where its mover listens, as in `EngineReady`."""


@attrs.frozen
class Fetch:
    """Fetch the blocks of a prompt that another engine computes now, as they are computed, if there is room for them.

    A hint: what does not come is computed. Not answered.
    """

    sequence_id: int
    """The sequence that will arrive, once its prompt is computed. `EndFetch` names it."""
    prompt_token_ids: list[int]
    root_key: bytes
    block_keys: list[bytes]
    peer: Peer


@attrs.frozen
class EndFetch:
    """Fetch nothing more for a sequence, which will not arrive. Ignored if nothing is being fetched for it."""

    sequence_id: int
