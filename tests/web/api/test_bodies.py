"""The memory budget that request bodies share: which bodies are refused, and that all memory is released."""

from __future__ import annotations

import json
from collections.abc import Callable

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.messages.outcomes import ErrorKind
from quipu.web.api.bodies import FREE_BYTES, BodyBudget, BodyShare, MeteredBody
from quipu.web.app import QuipuApp, make_app
from quipu.web.auth.key_file import KeyEntry
from quipu.web.auth.keys import KeyStore
from quipu.web.options import AppOptions
from quipu.web.request.errors import APIError
from tests.web.asgi_client import Client, Exchange
from tests.web.auth.test_auth import A, B, entry
from tests.web.fakes import FakeDesk, failure, scripted
from tests.web.http.live import PATIENCE_S

KIBIBYTE = 1024
BUDGET = 512 * KIBIBYTE


def body_of(num_bytes: int) -> bytes:
    return json.dumps({"model": "org/tiny", "prompt": "x" * num_bytes}).encode()


def app_with(desk: FakeDesk, *entries: KeyEntry) -> QuipuApp:
    keys = KeyStore(entries) if entries else None
    return make_app(desk, AppOptions(max_body_memory_bytes=BUDGET), keys)


async def eventually(look: Callable[[], bool]) -> None:
    """Wait for something in which a worker thread takes part."""
    with trio.fail_after(PATIENCE_S):
        while not look():
            await trio.sleep(0.001)


@pytest.mark.parametrize(("encoding", "status"), [("identity", 200), ("", 200), ("gzip", 415), ("GZIP, identity", 415)])
async def test_compressed_bodies(encoding: str, status: int) -> None:
    """A body declared as compressed is refused unread; the error names the header, in the API's shape."""
    client = Client(app_with(FakeDesk()))
    exchange, answer = await client.post("/v1/completions", body_of(10), {"Content-Encoding": encoding})
    assert exchange.status == status
    if status == 415:
        told = {"type": "invalid_request_error", "param": "Content-Encoding", "code": "unsupported_content_encoding"}
        assert told.items() <= answer["error"].items() and "Content-Encoding" in answer["error"]["message"]
        exchange, answer = await client.post("/v1/messages", body_of(10), {"Content-Encoding": encoding})
        assert exchange.status == 415 and answer["type"] == "error"


async def test_over_budget_is_503_until_memory_is_released() -> None:
    """A body beyond the budget gets a 503 with Retry-After, until other bodies have been encoded."""
    desk = FakeDesk(script=scripted(), gate=trio.Event())
    app = app_with(desk)
    large = body_of(400 * KIBIBYTE)
    async with Client(app).open("POST", "/v1/completions", large) as first:
        await eventually(lambda: bool(desk.tickets))
        assert app.bodies.num_bytes > 0
        exchange, answer = await Client(app).post("/v1/completions", large)
        assert exchange.status == 503
        assert exchange.headers["retry-after"]
        assert answer["error"]["code"] == "overloaded"
        assert desk.gate is not None
        desk.gate.set()
        await eventually(lambda: app.bodies.num_bytes == 0)
        first_ticket, desk.script = desk.ticket, scripted(failure(ErrorKind.INVALID))
        exchange, _ = await Client(app).post("/v1/completions", large)
        assert exchange.status == 400, "it must be served while the first one waits for its response"
        first_ticket.mailbox.put(failure(ErrorKind.INVALID))
        await first.json()
    assert app.bodies.num_bytes == 0


async def test_small_bodies_are_never_refused_for_memory() -> None:
    """A short prompt is served however full the budget is."""
    desk = FakeDesk(script=scripted())
    app = app_with(desk)
    app.bodies.num_bytes = app.bodies.max_bytes
    desk.script = scripted(failure(ErrorKind.INVALID))
    exchange, _ = await Client(app).post("/v1/completions", body_of(FREE_BYTES - 200))
    assert exchange.status == 400  # served: the error is the script's


async def test_objects_count_their_memory() -> None:
    """The objects of a body count with their memory before they are created, even if the body is short."""
    app = app_with(FakeDesk())
    many = b'{"model": "org/tiny", "prompt": "Hi.", "x": [' + b"{}," * 40_000 + b"{}]}"
    exchange, _ = await Client(app).post("/v1/completions", many)
    assert exchange.status == 503
    assert app.bodies.num_bytes == 0


async def test_tenant_is_limited_to_half() -> None:
    """With keys, a tenant that holds half of the budget is refused while another is served."""
    desk = FakeDesk(script=scripted(), gate=trio.Event())
    app = app_with(desk, entry(A, "a"), entry(B, "b"))
    large = body_of(200 * KIBIBYTE)

    async def ask(key: str) -> Exchange:
        exchange, _ = await Client(app).post("/v1/completions", large, {"Authorization": f"Bearer {key}"})
        return exchange

    async with Client(app).open("POST", "/v1/completions", large, {"Authorization": f"Bearer {A}"}):
        await eventually(lambda: bool(desk.tickets))
        assert (await ask(A)).status == 503
        desk.gate, desk.script = None, scripted(failure(ErrorKind.INVALID))
        assert (await ask(B)).status == 400
    await eventually(lambda: app.bodies.num_bytes == 0)
    assert not app.bodies.by_tenant


async def test_disconnect_releases_memory() -> None:
    """A client that disconnects releases its memory, also before its prompts are encoded."""
    app = app_with(FakeDesk(script=scripted(), gate=trio.Event()))
    async with Client(app).open("POST", "/v1/completions", body_of(300 * KIBIBYTE)) as exchange:
        await eventually(lambda: app.bodies.num_bytes > 0)
        exchange.leave()
        await eventually(lambda: app.bodies.num_bytes == 0)


@attrs.define(eq=False)
class Held:
    share: BodyShare
    tenant: str | None = None
    num_bytes: int = 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "grow", "grow", "grow", "assign", "release"]),
        st.integers(0, 5),
        st.integers(1, 200) | st.sampled_from([FREE_BYTES // KIBIBYTE]),
        st.sampled_from("ab"),
    ),
    max_size=60,
)


@given(STEPS)
def test_budget_is_sum_of_shares(steps: list[tuple[str, int, int, str]]) -> None:
    """Whatever shares do, in any order, no limit is exceeded, and nothing is held when all are released."""
    budget = BodyBudget(BUDGET)
    shares: list[Held] = []
    for what, which, size, tenant in steps:
        if what == "open":
            shares.append(Held(BodyShare(budget)))
            continue
        if which >= len(shares):
            continue
        held = shares[which]
        try:
            if what == "grow":
                held.share.grow(size * KIBIBYTE)
            elif what == "assign" and held.tenant is None:
                held.share.assign(tenant)
                held.tenant = tenant
            elif what == "release":
                held.share.release()
        except APIError as error:
            assert error.status == 503
            held.share.release()  # as at the end of its request
        assert 0 <= budget.num_bytes <= budget.max_bytes
        assert all(0 < num <= budget.max_bytes // 2 for num in budget.by_tenant.values())
    for held in shares:
        held.share.release()
        held.share.release()
    assert budget.num_bytes == 0
    assert not budget.by_tenant


@pytest.mark.parametrize("chunks", [1, 7])
async def test_take_hands_body_over(chunks: int) -> None:
    """The body is handed over, not copied."""
    body = MeteredBody(None, None, BodyShare(BodyBudget(BUDGET)))
    for _ in range(chunks):
        body.append(b"abc")
    body.set_complete()
    with trio.fail_after(PATIENCE_S):
        assert await body.take() == b"abc" * chunks
        assert await body.take() == b""
