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

from quipu.actors.request_desk.mailbox import Mailbox
from quipu.web.http.connection import Connection
from quipu.web.http.http11 import AppTasks, Protocol
from quipu.web.http.scope import Releases, RequestScope
from quipu.web.http.sse import Sink
from quipu.web.options import AppOptions
from quipu.web.request.request_context import RequestContext
from quipu.web.request.tally import Tally
from tests.runtimes import eventually, small_runtime
from tests.web.wires import PATIENCE_S, serving

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
OURS = (Connection, Protocol, AppTasks, RequestScope, Releases, RequestContext, Tally, Sink, Mailbox)
"""Types whose objects refer to a request."""


@pytest.fixture
def garbage() -> Iterator[list[Any]]:
    """Yield the list of objects that the collector finds in cycles; it does not run by itself meanwhile. Older objects
    are frozen, since scanning them would take half a second each time."""
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
async def test_finished_requests_leave_no_cycles(garbage: list[Any], name: str, leaves: bool) -> None:
    """A finished request leaves none of our objects in reference cycles."""
    path, fields = ASKED[name]
    async with small_runtime() as client, serving(client.runtime.desk, AppOptions()) as served:
        desk, num_tasks = client.runtime.desk, trio.lowlevel.current_statistics().tasks_living
        for _ in range(NUM_REQUESTS):
            peer = await served.connect()
            body = json.dumps({"model": "demo", **fields}).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
            await peer.stream.send_all(head.encode() + body)
            if not leaves:
                assert await peer.read_until(b"HTTP/1.1 ")
                await eventually(lambda: not desk.num_open_requests, "the request has ended")
            await peer.stream.aclose()
        await eventually(
            lambda: not desk.num_open_requests and trio.lowlevel.current_statistics().tasks_living <= num_tasks,
            "nothing of a request is left",
            PATIENCE_S,
        )
        gc.collect()
        left = Counter(type(each) for each in garbage)
    assert {ours.__name__: left[ours] for ours in OURS if left[ours]} == {}
