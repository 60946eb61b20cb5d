"""A server without keys: which routes it serves only to its own machine, and how an operator opens them to others."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from quipu.web.app import make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from quipu.web.cli import serve as serve_command
from quipu.web.cli.cli import make_parser
from quipu.web.cli.keys import key_store
from quipu.web.options import AppOptions
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

ADMIN = [
    ("POST", "/reset_prefix_cache"),
    ("GET", "/v1/admin/engines"),
    ("POST", "/v1/admin/engines"),
    ("POST", "/v1/admin/engines/0/drain"),
    ("POST", "/v1/admin/engines/0/move"),
    ("DELETE", "/v1/admin/engines/0"),
    ("GET", "/v1/organization/usage/completions"),
    ("GET", "/v1/organization/usage/embeddings"),
    ("GET", "/v1/organizations/usage_report/messages"),
    ("GET", "/v1/usage/r1"),
    ("GET", "/ui/usage"),
    ("GET", "/v1/cache/stats"),
    ("GET", "/v1/cache/tree"),
]


class NoUsage:
    """A usage source without records."""

    async def report(self, report: Any, party: Any) -> list[bytes]:
        return [b"null"]


async def ask(
    method: str,
    path: str,
    *,
    peer: tuple[str, int] | None = ("127.0.0.1", 1),
    headers: dict[str, str] | None = None,
    open_admin: bool = False,
    keys: KeyStore | None = None,
) -> tuple[int, bytes]:
    app = make_app(FakeDesk(), AppOptions(open_admin=open_admin), keys, usage=NoUsage())

    async def from_there(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await app(scope | {"client": peer}, receive, send)

    async with Client(from_there).open(method, path, headers=headers) as exchange:
        return await exchange.wait_started(), await exchange.read()


@pytest.mark.parametrize("path", ["/metrics", "/server_info"])
async def test_read_only_admin_routes(path: str) -> None:
    """Without keys, Prometheus on another machine can read the metrics."""
    assert (await ask("GET", path, peer=("192.0.2.1", 1), headers={"X-Forwarded-For": "192.0.2.2"}))[0] == 200


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_admin_routes_are_local(method: str, path: str) -> None:
    """Other machines and requests forwarded by a proxy are refused; the error names the flag."""
    for address in ("127.0.0.1", "127.0.0.9", "::1", "::ffff:127.0.0.1"):
        assert (await ask(method, path, peer=(address, 1)))[0] != 403, address
    for peer in (("192.0.2.1", 1), ("::2", 1), ("::ffff:192.0.2.1", 1), ("unix", 0), None):
        status, body = await ask(method, path, peer=peer)
        assert status == 403 and b"--open-admin" in body, peer
    for header in ("Forwarded", "X-Forwarded-For", "x-forwarded-host"):
        assert (await ask(method, path, headers={header: "127.0.0.1"}))[0] == 403, header


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_open_admin(method: str, path: str) -> None:
    """`--open-admin` serves admin routes to everyone, but has no effect with keys."""
    assert (await ask(method, path, peer=("192.0.2.1", 1), open_admin=True))[0] != 403
    keys = KeyStore([KeyEntry(id="k", name="k", tenant="t", sha256=hash_key("sk-1"))])
    assert (await ask(method, path, open_admin=True, keys=keys))[0] == 401


async def test_other_routes_are_open() -> None:
    """All other routes are open; with keys only the key counts, wherever a request comes from."""
    for path in ("/health", "/ready", "/version", "/v1/models", "/v1/models/tiny"):
        assert (await ask("GET", path, peer=("192.0.2.1", 1)))[0] == 200
    admin = KeyStore([KeyEntry(id="k", name="k", tenant="t", sha256=hash_key("sk-1"), admin=True)])
    headers = {"x-api-key": "sk-1", "X-Forwarded-For": "192.0.2.7"}
    assert (await ask("GET", "/server_info", peer=("192.0.2.1", 1), headers=headers, keys=admin))[0] == 200


@pytest.mark.parametrize(
    ("flags", "is_warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "::"], True),
        (["--host", "quipu.example"], True),
        (["--host", "0.0.0.0", "--api-key", "sk-1"], False),
        ([], False),
        (["--host", "localhost"], False),
        (["--host", "::1"], False),
    ],
)
def test_warning_if_open_beyond_loopback(flags: list[str], is_warned: bool) -> None:
    """A server without keys beyond loopback logs a warning at startup, once."""
    arguments = make_parser().parse_args(["serve", "demo", *flags])
    with capture_logs() as entries:
        serve_command.warn_where_open(arguments.host, key_store(arguments, {}))
    assert [entry["event"] for entry in entries] == ["server.open"] * is_warned


def test_key_of_vllm_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable by which vLLM is given its key is not read: the warning says so to whoever relies on it."""
    monkeypatch.setenv("VLLM_API_KEY", "sk-1")
    with capture_logs() as entries:
        serve_command.warn_where_open("0.0.0.0", key_store(make_parser().parse_args(["serve", "demo"]), {}))
    assert entries[0]["detail"].endswith("VLLM_API_KEY is not read: call it QUIPU_API_KEY")
