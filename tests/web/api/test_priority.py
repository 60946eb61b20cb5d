"""The operator decides who may set a priority: `priority` is accepted only where it is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quipu.web.app import make_app
from quipu.web.auth.key_file import KeyEntry, hash_key, read_key_file
from quipu.web.auth.keys import KeyStore
from quipu.web.cli.cli import main
from quipu.web.options import AppOptions
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

ALLOWED, PLAIN, ADMIN = "sk-allowed", "sk-plain", "sk-admin"
MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
}


def entry(key: str, tenant: str, *, admin: bool = False, priority: bool = False) -> KeyEntry:
    return KeyEntry(id=tenant, name=tenant, tenant=tenant, sha256=hash_key(key), admin=admin, priority=priority)


def store() -> KeyStore:
    return KeyStore([entry(ALLOWED, "a", priority=True), entry(PLAIN, "b"), entry(ADMIN, "ops", admin=True)])


async def ask(
    path: str, priority: object, *, key: str | None = None, options: AppOptions | None = None
) -> tuple[int, Any, FakeDesk]:
    desk = FakeDesk()
    app = make_app(desk, options, None if key is None else store())
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": "tiny", **BODIES[path], "priority": priority}
    exchange, answer = await Client(app).post(path, body, headers=headers)
    return exchange.status, answer, desk


@pytest.mark.parametrize("path", BODIES)
async def test_refused_by_name(path: str) -> None:
    """On every API a 400 names the field, the flag and the key file's field, before an account is opened."""
    for priority in (-1, 7):
        status, answer, desk = await ask(path, priority)
        assert status == 400
        message = answer["error"]["message"]
        assert all(name in message for name in ("`priority`", "--allow-client-priority", "priority = true"))
        if path != "/v1/messages":
            assert (answer["error"]["param"], answer["error"]["code"]) == ("priority", "priority_not_allowed")
        assert not desk.tickets


@pytest.mark.parametrize("path", BODIES)
async def test_neutral_priority_is_accepted(path: str) -> None:
    """0 and null are always accepted."""
    for priority in (0, None):
        status, _, desk = await ask(path, priority)
        assert (status, desk.ticket.encode.priority) == (200, 0)


@pytest.mark.parametrize("path", BODIES)
async def test_allowed_by_flag(path: str) -> None:
    """`--allow-client-priority` allows every request a priority."""
    status, _, desk = await ask(path, -3, options=AppOptions(allow_client_priority=True))
    assert (status, desk.ticket.encode.priority) == (200, -3)


async def test_allowed_by_key() -> None:
    """A key with `priority` may set one; others, including admin keys, may not."""
    statuses = {key: (await ask("/v1/completions", -3, key=key))[0] for key in (ALLOWED, PLAIN, ADMIN)}
    assert statuses == {ALLOWED: 200, PLAIN: 400, ADMIN: 400}


def test_key_file_sets_priority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`quipu keys new --priority` writes the field, and it defaults to false."""
    assert main(["keys", "new", "--tenant", "a", "--name", "n", "--priority"]) == 0
    assert main(["keys", "new", "--tenant", "b", "--name", "n"]) == 0
    path = tmp_path / "keys.toml"
    path.write_text(capsys.readouterr().out)
    assert [one.priority for one in read_key_file(path)] == [True, False]
    path.write_text(path.read_text().replace("priority = true\n", ""))
    assert [one.priority for one in read_key_file(path)] == [False, False]
