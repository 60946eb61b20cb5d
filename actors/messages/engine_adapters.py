"""What the web side tells engines of adapters, and what they answer.

What must always hold: an engine has an adapter from its answer on until it is told to unload it; the web side submits
sequences with an adapter only meanwhile.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class KeepAdapters:
    """Unload all adapters but these. Sent first to each incarnation, which has no sequences yet."""

    digests: tuple[str, ...]


@attrs.frozen
class LoadAdapter:
    """Load an adapter. Answered by one `AdapterLoaded`."""

    number: int
    folder: str
    digest: str
    """What it has to be, so that all engines have the same. Empty: not known yet."""


@attrs.frozen
class UnloadAdapter:
    """Unload an adapter, once every pass that was planned before has run."""

    digest: str


@attrs.frozen
class AdapterLoaded:
    number: int
    digest: str
    error: str = ""
    """Why it was not loaded; empty if it was."""


AdapterMessage = KeepAdapters | LoadAdapter | UnloadAdapter
