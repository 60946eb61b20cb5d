"""A finished request leaves nothing of ours to the garbage collector.

Objects in reference cycles are freed long afterwards, and those of a thousand requests at once, on the event loop: that
blocked all streams for 70 ms. So everything that refers to a request drops its reference.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from quipu.web.options import AppOptions
from tests.runtimes import small_runtime
from tests.web.wires import serving

CHAT = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "Hi.", "max_tokens": 3}),
    "completion, streamed": ("/v1/completions", {"prompt": "Hi.", "max_tokens": 3, "stream": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, streamed": ("/v1/chat/completions", CHAT | {"stream": True}),
    "messages, streamed": ("/v1/messages", CHAT | {"stream": True}),
    "response": ("/v1/responses", {"input": "Hi.", "max_output_tokens": 16}),
    "count": ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    "refused": ("/v1/completions", {"prompt": "Hi.", "max_tokens": -1}),
    "too long": ("/v1/completions", {"prompt": "Hi. " * 9000}),
}
NUM_REQUESTS = 5
OURS = ("Connection", "Protocol", "AppTasks", "RequestScope", "Releases", "RequestContext", "Tally", "Sink", "Mailbox")
"""Types whose objects refer to a request."""


@pytest.fixture
def garbage() -> Iterator[list[Any]]:
    """Collect everything in cycles when called; the collector does not run by itself meanwhile. Older objects are
    frozen, since scanning them would take half a second each time."""
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    found: list[Any] = gc.garbage
    try:
        yield found
    finally:
        gc.set_debug(0)
        gc.enable()
        found.clear()


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("leaves", [False, True], ids=["answered", "left"])
async def test_nothing_is_left_to_the_collector(garbage: list[Any], name: str, leaves: bool) -> None:
    """A finished request leaves none of our objects in reference cycles."""
    path, fields = ASKED[name]
    async with small_runtime() as client, serving(client.runtime.desk, AppOptions()) as served:
        for _ in range(NUM_REQUESTS):
            peer = await served.connect()
            body = json.dumps({"model": "demo", **fields}).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
            await peer.stream.send_all(head.encode() + body)
            if not leaves:
                assert await peer.read_until(b"HTTP/1.1 ")
                await trio.sleep(0.05)
            await peer.stream.aclose()
        with trio.fail_after(10):
            while client.runtime.desk.num_open_requests:
                await trio.sleep(0.01)
        await trio.sleep(0.1)
        gc.collect()
        left = Counter(type(each).__name__ for each in garbage)
    assert {name: left[name] for name in OURS if left[name]} == {}
