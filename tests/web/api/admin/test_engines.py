"""The endpoints with which operators list, add, drain and remove engines."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.body_parts import JUNK, mostly
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.config.runtime_config import MAX_ENGINES
from quipu.actors.messages.supervisor import EngineReady
from quipu.actors.request_desk.health import DrainMode, EngineState, EngineStatus
from quipu.web.app import make_app
from tests.web.asgi_client import Client
from tests.web.fakes import INFO, FakeDesk

PATH = "/v1/admin/engines"
READY = EngineReady(
    incarnation=7, num_blocks=65, block_size=16, backend="cpu", dtype="bfloat16", num_threads=2, numerics="abc"
)
OTHER = attrs.evolve(READY, incarnation=9, numerics="def")
ENGINES = (
    EngineStatus(0, 8, EngineState.STARTING, "loading", None, deaths=3),
    EngineStatus(2, 7, EngineState.READY, "", READY, 3, 5, 40, 64, 1, EngineRole.DECODE),
    EngineStatus(3, 9, EngineState.READY, "", OTHER),
)


def desk_of(*engines: EngineStatus) -> FakeDesk:
    return FakeDesk(engine_list=list(engines or ENGINES))


async def ask(desk: FakeDesk, method: str, path: str, body: object = b"") -> tuple[int, Any]:
    return await ask_of(Client(make_app(desk)), method, path, body)


async def ask_of(client: Client, method: str, path: str, body: object) -> tuple[int, Any]:
    async with client.open(method, path, body) as exchange:
        answer = await exchange.json()
        return exchange.status, answer


async def test_list() -> None:
    """Every engine is listed with its load; one that was never ready has no `numerics`."""
    status, answer = await ask(desk_of(), "GET", PATH)
    assert status == 200
    assert answer["engines"][:2] == [
        {
            "id": 0,
            "incarnation": 8,
            "role": "mixed",
            "state": "starting",
            "detail": "loading",
            "numerics": None,
            "num_running": 0,
            "num_waiting": 0,
            "blocks_used": 0,
            "blocks_total": 0,
            "deaths": 3,
        },
        {
            "id": 2,
            "incarnation": 7,
            "role": "decode",
            "state": "ready",
            "detail": "",
            "numerics": "abc",
            "num_running": 3,
            "num_waiting": 5,
            "blocks_used": 40,
            "blocks_total": 64,
            "deaths": 1,
        },
    ]


async def test_server_info_describes_each_engine() -> None:
    """`engine` is the first that is ready; `engines` has all, without a description before one was ready."""
    _, info = await ask(desk_of(), "GET", "/server_info")
    assert [(one["id"], one["incarnation"], one["state"]) for one in info["engines"]] == [
        (0, 8, "starting"),
        (2, 7, "ready"),
        (3, 9, "ready"),
    ]
    assert [one["engine"] and one["engine"]["numerics"] for one in info["engines"]] == [None, "abc", "def"]
    assert info["engine"] == info["engines"][1]["engine"]


async def test_server_info_without_a_ready_engine() -> None:
    """While no engine is ready, `engine` describes the last one that was, or is null."""
    desk = desk_of(ENGINES[0])
    assert (await ask(desk, "GET", "/server_info"))[1]["engine"] is None
    desk.info = attrs.evolve(INFO, engine=OTHER)
    assert (await ask(desk, "GET", "/server_info"))[1]["engine"]["numerics"] == "def"


@pytest.mark.parametrize(("body", "ids"), [(b"", [4]), ({}, [4]), ({"count": None}, [4]), ({"count": 3}, [4, 5, 6])])
async def test_add(body: object, ids: list[int]) -> None:
    """As many engines are started as were requested, by default one; the answer has their ids at once."""
    desk = desk_of()
    assert await ask(desk, "POST", PATH, body) == (202, {"ids": ids})
    assert [status.engine_id for status in desk.engines()] == [0, 2, 3, *ids]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"count": 0}, "invalid_value"),
        ({"count": -1}, "invalid_value"),
        ({"count": MAX_ENGINES + 1}, "invalid_value"),
        ({"count": MAX_ENGINES - 2}, "invalid_value"),  # three more are there already
        ({"count": "1"}, "invalid_type"),
        ({"count": True}, "invalid_type"),
        ({"count": 1.5}, "invalid_type"),
    ],
)
async def test_add_refuses(body: object, code: str) -> None:
    """An invalid number of engines, or too many in all, is a 400 that names `count`; nothing is started."""
    desk = desk_of()
    status, answer = await ask(desk, "POST", PATH, body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "count", code)
    assert "`count`" in answer["error"]["message"]
    assert len(desk.engines()) == 3


async def test_add_up_to_the_maximum() -> None:
    """Engines can be added up to the maximum."""
    desk = desk_of()
    assert (await ask(desk, "POST", PATH, {"count": MAX_ENGINES - 3}))[0] == 202
    assert (await ask(desk, "POST", PATH))[0] == 400


@pytest.mark.parametrize(
    ("body", "mode", "timeout_s"),
    [
        (b"", DrainMode.FINISH, None),
        ({"mode": "finish", "timeout_s": 0}, DrainMode.FINISH, 0.0),
        ({"mode": "hand_over", "timeout_s": 2.5}, DrainMode.HAND_OVER, 2.5),
        ({"mode": "move"}, DrainMode.MOVE, None),
        ({"mode": None, "timeout_s": None}, DrainMode.FINISH, None),
    ],
)
async def test_drain(body: object, mode: DrainMode, timeout_s: float | None) -> None:
    """The engine drains as requested, and the answer is its status from then on."""
    desk = desk_of()
    status, answer = await ask(desk, "POST", f"{PATH}/2/drain", body)
    assert (status, answer["id"], answer["state"], answer["num_running"]) == (202, 2, "draining", 3)
    assert desk.drains == [(2, mode, timeout_s, False)]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"mode": "now"}, "mode", "invalid_value"),
        ({"mode": 1}, "mode", "invalid_type"),
        ({"mode": ["finish"]}, "mode", "invalid_type"),
        ({"timeout_s": -0.5}, "timeout_s", "invalid_value"),
        ({"timeout_s": "5"}, "timeout_s", "invalid_type"),
        ({"timeout_s": True}, "timeout_s", "invalid_type"),
        (b'{"timeout_s": 1e999}', None, "invalid_json"),
        (b'{"timeout_s": NaN}', None, "invalid_json"),
        (b"[]", None, "invalid_type"),
    ],
)
async def test_drain_refuses(body: object, param: str | None, code: str) -> None:
    """An invalid field is a 400 that names it, and the engine goes on."""
    desk = desk_of()
    status, answer = await ask(desk, "POST", f"{PATH}/2/drain", body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
    assert not desk.drains


@pytest.mark.parametrize(
    ("body", "target_id", "moved"),
    [({"count": 2}, None, 2), ({"count": 9, "to": 3}, 3, 3), ({"count": 1, "to": None}, None, 1)],
)
async def test_move(body: dict[str, Any], target_id: int | None, moved: int) -> None:
    """Others continue some of an engine's requests, and the answer is how many."""
    desk = desk_of()
    assert await ask(desk, "POST", f"{PATH}/2/move", body) == (202, {"id": 2, "count": moved})
    assert desk.moves == [(2, body["count"], target_id)] and not desk.drains


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({}, 400, "count", "missing_required_parameter"),
        (b"", 400, "count", "missing_required_parameter"),
        ({"count": 0}, 400, "count", "invalid_value"),
        ({"count": 2**20 + 1}, 400, "count", "invalid_value"),
        ({"count": 1.5}, 400, "count", "invalid_type"),
        ({"count": 1, "to": -1}, 400, "to", "invalid_value"),
        ({"count": 1, "to": "3"}, 400, "to", "invalid_type"),
        ({"count": 1, "to": 7}, 409, "to", "no_target"),
    ],
)
async def test_move_refuses(body: object, status: int, param: str, code: str) -> None:
    """An invalid field is a 400 that names it, an engine that cannot continue anything a 409, and nothing is moved."""
    desk = desk_of()
    found, answer = await ask(desk, "POST", f"{PATH}/2/move", body)
    assert (found, answer["error"]["param"], answer["error"]["code"]) == (status, param, code)
    assert not desk.moves


async def test_add_with_a_role() -> None:
    """Engines are added with the role that the body names, and none has another by itself."""
    desk = desk_of()
    assert await ask(desk, "POST", PATH, {"count": 2, "role": "prefill"}) == (202, {"ids": [4, 5]})
    assert await ask(desk, "POST", PATH, {"role": None}) == (202, {"ids": [6]})
    assert [status.role for status in desk.engines()[3:]] == ["prefill", "prefill", "mixed"]


async def test_change_role() -> None:
    """A role is changed at once, and the answer is the engine's status."""
    desk = desk_of()
    status, answer = await ask(desk, "PATCH", f"{PATH}/3", {"role": "prefill"})
    assert (status, answer["id"], answer["role"], answer["state"]) == (200, 3, "prefill", "ready")
    assert [its.role for its in desk.engines()] == ["mixed", "decode", "prefill"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"role": "both"}, "invalid_value"),
        ({"role": ""}, "invalid_value"),
        ({"role": 1}, "invalid_type"),
        ({"role": ["prefill"]}, "invalid_type"),
        ({"role": None}, "missing_required_parameter"),
        ({}, "missing_required_parameter"),
        (b"", "missing_required_parameter"),
    ],
)
async def test_change_role_refuses(body: object, code: str) -> None:
    """What is no role is a 400 that names the field, and nothing changes."""
    desk = desk_of()
    status, answer = await ask(desk, "PATCH", f"{PATH}/2", body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "role", code)
    assert [its.role for its in desk.engines()] == ["mixed", "decode", "mixed"]


async def test_server_without_roles() -> None:
    """Where engines cannot have roles, asking for one is a 409 that says why; `mixed` is what they all are."""
    desk = attrs.evolve(desk_of(), why_no_roles="they are scaled automatically")
    for method, path in (("POST", PATH), ("PATCH", f"{PATH}/3")):
        status, answer = await ask(desk, method, path, {"role": "prefill"})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (409, "role", "roles_refused")
        assert answer["error"]["message"] == "they are scaled automatically."
    assert len(desk.engines()) == 3
    assert (await ask(desk, "PATCH", f"{PATH}/3", {"role": "mixed"}))[0] == 200


@pytest.mark.parametrize("engine_id", ["1", "4", "-1", "02", "x", "2.0", "9" * 400, "٢"])
@pytest.mark.parametrize(("method", "suffix"), [("POST", "/drain"), ("POST", "/move"), ("DELETE", ""), ("PATCH", "")])
async def test_unknown_engine(method: str, suffix: str, engine_id: str) -> None:
    """An id that no engine has is a 404."""
    desk = desk_of()
    body = {"role": "decode"} if method == "PATCH" else {"count": 1} if suffix == "/move" else b""
    status, answer = await ask(desk, method, f"{PATH}/{engine_id}{suffix}", body)
    assert (status, answer["error"]["code"]) == (404, "engine_not_found")
    assert not desk.drains and not desk.moves


async def test_remove() -> None:
    """An engine is removed, not by force, and the answer is its status until it is gone."""
    desk = desk_of()
    status, answer = await ask(desk, "DELETE", f"{PATH}/3")
    assert (status, answer["id"], answer["state"]) == (202, 3, "draining")
    assert desk.drains == [(3, DrainMode.HAND_OVER, None, False)]


async def test_last_engine() -> None:
    """The last engine is neither drained nor removed (409), unless by force."""
    desk = desk_of(ENGINES[1])
    for method, path in (("POST", "/2/drain"), ("DELETE", "/2"), ("DELETE", "/2?force=false")):
        status, answer = await ask(desk, method, PATH + path)
        assert (status, answer["error"]["code"]) == (409, "last_engine")
        assert ("force=true" in answer["error"]["message"]) == (method == "DELETE")
    assert (await ask(desk, "DELETE", f"{PATH}/2?force=maybe"))[1]["error"]["param"] == "force"
    assert not desk.drains
    assert (await ask(desk, "DELETE", f"{PATH}/2?force=true"))[0] == 202
    assert desk.drains == [(2, DrainMode.HAND_OVER, None, True)]


async def test_engine_that_is_gone_at_once() -> None:
    """The answer is the same if the desk has dropped the engine before it is written."""

    class Quick(FakeDesk):
        def drain(self, *arguments: Any, **by_name: Any) -> None:
            super().drain(*arguments, **by_name)
            del self.engine_list[1]

    desk = Quick(engine_list=list(ENGINES))
    status, answer = await ask(desk, "DELETE", f"{PATH}/2")
    assert (status, answer["id"], answer["state"], answer["num_running"]) == (202, 2, "draining", 0)


async def test_unknown_fields_are_named() -> None:
    """A field that has no effect is named in a header, as on other endpoints."""
    async with Client(make_app(desk_of())).open(
        "POST", f"{PATH}/2/drain", {"timeout": 1, "mode": "finish"}
    ) as exchange:
        assert await exchange.wait_started() == 202
        assert exchange.headers["x-quipu-ignored-fields"] == "timeout"


ADDED = st.fixed_dictionaries(
    {}, optional={"count": mostly(st.sampled_from([1, 2, MAX_ENGINES - 3, MAX_ENGINES]), JUNK), "x": JUNK}
)
DRAINED = st.fixed_dictionaries(
    {},
    optional={
        "mode": mostly(st.sampled_from(["finish", "hand_over", "move"]), JUNK),
        "timeout_s": mostly(st.floats(0, 1e308) | st.integers(0, 2**70), JUNK),
    },
)


@given(st.lists(st.tuples(st.just(PATH), ADDED | JUNK) | st.tuples(st.just(f"{PATH}/2/drain"), DRAINED | JUNK)))
@settings(max_examples=20)
def test_random_bodies(drawn: list[tuple[str, Any]]) -> None:
    """Every body is obeyed or refused with a message, and there are never too many engines."""

    async def send() -> None:
        desk = desk_of()
        client = Client(make_app(desk))
        for path, body in drawn:
            status, answer = await ask_of(client, "POST", path, json.dumps(body).encode())
            assert status == 202 or (status == 400 and answer["error"]["message"]), answer
        assert len(desk.engines()) <= MAX_ENGINES
        for _, _, timeout_s, _ in desk.drains:
            assert timeout_s is None or 0 <= timeout_s < float("inf")

    trio.run(send)
