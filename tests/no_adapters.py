"""What a server without adapters has of them, for tests."""

from __future__ import annotations

import trio

from quipu.actors.request_desk.adapters import Adapters
from quipu.actors.request_desk.engine_pool import EnginePool


def no_adapters() -> Adapters:
    """Return what a server without adapters has of them."""
    return Adapters(
        EnginePool(),
        max_loras=0,
        modules={},
        is_used=lambda digest: False,
        until_released=trio.sleep_forever,
        note_released=lambda: None,
    )
