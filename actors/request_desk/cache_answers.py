"""What the web layer may be told about prompts and the cache: what one would find now, what one has found.

Part of the desk's interface (`interface.py`); immutable.
"""

from __future__ import annotations

from typing import Protocol

import attrs

from ..messages.block_manager import CacheMiss
from ..messages.explanations import Explanation
from ..messages.prompts import PartSpan


@attrs.frozen
class PromptLookUp:
    """What a prompt would find in the cache now."""

    num_prompt_tokens: int
    num_cached_tokens: int
    engine_id: int
    """The engine that it would be sent to."""
    miss: CacheMiss
    """Why it is not more."""
    pinned_for_s: float | None
    """Seconds until the last pin expires that ends within the cached prefix. None: there is none."""
    num_host_tokens: int = 0
    """Those of the cached ones that would be loaded from the engine's host tier."""
    spans: tuple[PartSpan, ...] = ()
    """The tokens of each part of each message, if the prompt is a chat."""


class Explain(Protocol):
    """Explains what became of a request's prompts in the cache."""

    def __call__(self, request_id: str, tenant: str | None, /) -> Explanation | None:
        """Return what is known of a request of this tenant, None: of any; None if that is nothing, or not any more."""
        ...
