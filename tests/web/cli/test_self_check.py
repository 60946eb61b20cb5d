"""The request that the server sends to itself before it is ready (`web/cli/self_check.py`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import attrs
import httpx2
import pytest
import trio

from quipu.actors.request_desk.desk import RequestDesk
from quipu.actors.request_desk.health import State
from quipu.web.api.bodies import MeteredBody
from quipu.web.app import make_app
from quipu.web.cli import self_check
from quipu.web.cli.self_check import SelfCheckedApp
from quipu.web.cli.stand_in_desk import ANSWER, COUNTED, MODEL, StandInDesk
from quipu.web.http.server import serve
from tests.runtimes import small_runtime

NOT_YET = "the server has not answered its own request yet"


@asynccontextmanager
async def checked() -> AsyncIterator[tuple[SelfCheckedApp, RequestDesk, str]]:
    """Serve a real desk on a real socket, before the check."""
    async with small_runtime() as client, trio.open_nursery() as nursery:
        desk = client.runtime.desk
        app = SelfCheckedApp(make_app(desk), desk)
        (address,) = await nursery.start(
            lambda task_status: serve(app, host="127.0.0.1", port=0, task_status=task_status)
        )
        yield app, desk, address.url
        nursery.cancel_scope.cancel()


async def test_ready_after_the_answer() -> None:
    """Readiness is withheld until the answer has come, which changes no counter, opens no account and needs no key."""
    async with checked() as (app, desk, url):
        assert (desk.health().state, desk.health().detail) == (State.STARTING, NOT_YET)
        before = desk.render_metrics()
        await app.check(url)
        assert desk.health().is_ready
        assert _counted(desk.render_metrics()) == _counted(before)
        assert desk.num_open_requests == 0


def _counted(metrics: bytes) -> list[str]:
    """Return the lines of everything that requests can change."""
    noise = ("process_", "python_", "quipu:event_loop")
    return [line for line in metrics.decode().splitlines() if not line.startswith(noise)]


async def test_only_the_token_gets_there() -> None:
    """A client cannot reach the answers of the check, before or after it."""
    async with checked() as (app, _desk, url):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        async with httpx2.AsyncClient(trust_env=False) as http:
            for token in ("", "0" * 32):
                answer = await http.post(url + self_check.PATH, json=body, headers={self_check.TOKEN_HEADER: token})
                assert answer.status_code == 404, "the real application knows no such model"
            right = {self_check.TOKEN_HEADER: app.token}
            assert (await http.post(url + self_check.PATH, json=body, headers=right)).status_code == 200
            await app.check(url)
            assert (await http.post(url + self_check.PATH, json=body, headers=right)).status_code == 404


async def test_broken_bodies_are_noticed_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every chat is a 500, because of an incompatible library, the server is not ready, and its health says why."""

    async def take(self: MeteredBody, connection: object = None) -> bytearray:
        raise AttributeError("'Body' object has no attribute '_data'")

    taken = MeteredBody.take
    monkeypatch.setattr(MeteredBody, "take", take)
    monkeypatch.setattr(self_check, "RETRY_S", (0.0, 0.0))
    async with checked() as (app, desk, url), trio.open_nursery() as nursery:
        nursery.start_soon(app.check, url)
        while desk.health().state is not State.REFUSING:
            await trio.lowlevel.checkpoint()
        assert "answered with status 500" in desk.health().detail
        assert not desk.health().is_healthy
        monkeypatch.setattr(MeteredBody, "take", taken)
        while not desk.health().is_ready:
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("stream", "data", "wrong"),
    [
        (False, b"{}", "a whole response cannot be read"),
        (False, b"\xff", "a whole response cannot be read"),
        (True, b"", "a stream cannot be read"),
        (True, b"data: {}\n\n", "does not end with [DONE]"),
        (True, b"data: {}\n\ndata: [DONE]\n\n", "a stream cannot be read"),
    ],
)
async def test_wrong_answers(stream: bool, data: bytes, wrong: str) -> None:
    """An invalid response raises WrongAnswer, never another exception."""
    with pytest.raises(self_check.WrongAnswer, match=wrong.replace("[", r"\[")):
        (self_check.streamed_answer if stream else self_check.whole_answer)(data)


async def test_wrong_usage_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer's numbers are compared with what was counted, too."""
    monkeypatch.setattr(self_check, "RETRY_S", (0.0, 0.0))
    async with checked() as (app, desk, url), trio.open_nursery() as nursery:
        real = self_check.whole_answer
        wrong = {"prompt_tokens": 0, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
        monkeypatch.setattr(self_check, "whole_answer", lambda data: (real(data)[0], wrong))
        nursery.start_soon(app.check, url)
        while desk.health().state is not State.REFUSING:
            await trio.lowlevel.checkpoint()
        assert "its usage is (0, 2, 0)" in desk.health().detail
        nursery.cancel_scope.cancel()


async def test_nothing_is_passed_on() -> None:
    """Without engines nothing is tokenized, and a request is never passed on to an upstream."""
    async with small_runtime() as client:
        desk = client.runtime.desk
        desk.info = attrs.evolve(desk.info, has_engines=False, passed_on={"far": None}, shared=frozenset({"both"}))
        stand_in = StandInDesk(desk)
        assert (stand_in.info.passed_on, stand_in.info.shared, stand_in.upstreams) == ({}, frozenset(), None)
        assert stand_in.info.has_engines, "otherwise the endpoints would refuse it"
        assert await stand_in.count_tokens(COUNTED, "messages") == len(ANSWER)


async def test_ready_with_upstreams_alone() -> None:
    """A server that only passes requests on answers its own request, too."""
    async with small_runtime() as client, trio.open_nursery() as nursery:
        desk = client.runtime.desk
        desk.info = attrs.evolve(desk.info, model_names=(), has_engines=False, passed_on={"far": None})
        app = SelfCheckedApp(make_app(desk), desk)
        (address,) = await nursery.start(partial(serve, app, host="127.0.0.1", port=0))
        await app.check(address.url)
        assert desk.health().is_ready
        nursery.cancel_scope.cancel()
