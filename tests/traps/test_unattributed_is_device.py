"""Trap: hits of which nobody said where they lay are labelled as the device's.

An operator then sees a device cache that is better than it is. Here they are `unattributed`.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.traps.wire import COMPLETIONS
from tests.web.fakes import Client, FakeDesk, hello, record, says

from quipu.actors.messages import Closed
from quipu.web.app import make_app


@pytest.mark.parametrize(
    ("split", "device", "unattributed"),
    [({}, 0, 48), ({"host": 16}, 0, 32), ({"device": 16}, 16, 32), ({"device": 48}, 48, 0), ({"tape": 48}, 0, 48)],
)
async def test_unknown_tier(split: dict[str, int], device: int, unattributed: int) -> None:
    """The device's part is what was booked as the device's, and no token more."""
    closed = Closed(record(prompt_tokens=50, cached_tokens=48, cached_by_tier=split), None)
    request = {"model": "tiny", "prompt": "x", "return_cached_tokens_details": True}
    _, answer = await Client(make_app(FakeDesk(says(*hello()[:-1], closed)))).post(COMPLETIONS, request)
    tiers: dict[str, Any] = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert (tiers["device"], tiers["unattributed"]) == (device, unattributed)
