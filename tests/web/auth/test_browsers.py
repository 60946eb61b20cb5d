"""Requests that a web page makes a visitor's browser send: under a host name of its own, or across sites."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import pytest

from quipu.web.app import make_app
from quipu.web.auth.browser_rules import BrowserRules, is_same_origin, parse_hosts, parse_origins
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from quipu.web.cli.cli import make_parser
from quipu.web.cli.serve import browser_rules
from quipu.web.options import AppOptions
from tests.web.asgi_client import Client, Exchange
from tests.web.fakes import FakeDesk

SITE = "https://site.example"
PATH = "/v1/completions"
BODY = {"model": "tiny", "prompt": "x"}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def flags(*given: str) -> argparse.Namespace:
    found: argparse.Namespace = make_parser().parse_args(["serve", "demo", *given])
    return found


def rules(*given: str, has_keys: bool = False) -> BrowserRules:
    """Return the rules of a server started with these flags."""
    return browser_rules(flags(*given), has_keys=has_keys)


async def ask(
    rules: BrowserRules,
    method: str,
    path: str,
    host: str | None,
    headers: Mapping[str, str] | None = None,
    *keys: KeyEntry,
) -> tuple[Exchange, bytes]:
    app = make_app(FakeDesk(), AppOptions(browsers=rules), KeyStore(keys))

    async def under_its_name(scope: dict[str, Any], receive: Any, send: Any) -> None:
        fields = [(name, value) for name, value in scope["headers"] if name != b"host"]
        fields += [] if host is None else [(b"host", host.encode())]
        version = "1.0" if host is None else "1.1"
        await app(scope | {"headers": fields, "http_version": version}, receive, send)

    async with Client(under_its_name).open(method, path, BODY, headers) as exchange:
        await exchange.wait_started()
        return exchange, await exchange.read()


LOOPBACK = [
    "localhost",
    "LOCALHOST:8000",
    "a.b.localhost",
    "127.0.0.1",
    "127.0.0.1:1",
    "127.9.8.7",
    "[::1]:80",
    "[::1]",
]
OTHERS = [
    "",
    "rebound.example",
    "localhost.rebound.example",
    "localhost:80:80",
    "localhost@rebound.example",
    "notlocalhost",
    "128.0.0.1",
    "0.0.0.0",
    "[::2]",
    "::1",
    "127.0.0.1.rebound.example",
]


@pytest.mark.parametrize("host", [*LOOPBACK, *OTHERS])
@pytest.mark.parametrize(("method", "path"), [("POST", PATH), ("GET", "/health"), ("GET", "/nothing")])
async def test_loopback_hosts(host: str, method: str, path: str) -> None:
    """An open server on loopback answers only to loopback names; the error names the flag."""
    exchange, body = await ask(rules(), method, path, host)
    assert (exchange.status == 403) == (host in OTHERS)
    assert (b"--allowed-hosts" in body) == (host in OTHERS)


async def test_no_host() -> None:
    """An HTTP/1.0 probe needs no `Host`; browsers, which a foreign page can misuse, always send one."""
    assert (await ask(rules(), "GET", "/health", None))[0].status == 200


async def test_allowed_hosts() -> None:
    """Allowed hosts are served besides loopback; with a port only on that port; `*` allows all."""
    named = rules("--allowed-hosts", "quipu.example,Other.Example:8000", "--allowed-hosts", "third.example")
    for host, status in {
        "quipu.example": 200,
        "QUIPU.example:81": 200,
        "other.example:8000": 200,
        "other.example": 403,
        "third.example": 200,
        "localhost:8000": 200,
        "x.quipu.example": 403,
    }.items():
        assert (await ask(named, "POST", PATH, host))[0].status == status, host
    assert (await ask(rules("--allowed-hosts", "*"), "POST", PATH, "rebound.example"))[0].status == 200


async def test_when_hosts_are_checked() -> None:
    """Hosts are not checked beyond loopback or with keys, unless the operator lists some."""
    for unchecked in (rules("--host", "0.0.0.0"), rules("--host", "192.0.2.1"), rules(has_keys=True), BrowserRules()):
        assert (await ask(unchecked, "POST", PATH, "quipu.example"))[0].status in (200, 401)
    for address in ("localhost", "127.0.0.2", "::1"):
        assert (await ask(rules("--host", address), "POST", PATH, "quipu.example"))[0].status == 403
    named = rules("--host", "0.0.0.0", "--allowed-hosts", "quipu.example")
    assert (await ask(named, "POST", PATH, "other.example"))[0].status == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://localhost:8000"}, 200),
        ({"Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Origin": "http://localhost"}, 403),
        ({"Origin": SITE}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[::1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "Cross-Site", "Origin": "http://localhost:8000"}, 403),
        ({"Origin": SITE, "Access-Control-Request-Method": "POST"}, 403),
    ],
)
async def test_cross_site_requests(headers: dict[str, str], status: int) -> None:
    """An open server serves only its own pages, wherever it listens; the error names the flag."""
    for served in (rules(), rules("--host", "0.0.0.0")):
        for method in ("POST", "OPTIONS"):
            exchange, body = await ask(served, method, PATH, "localhost:8000", headers)
            assert exchange.status == status
            assert (b"--allowed-origins" in body) == (status == 403)
            assert not any(name.startswith("access-control") for name in exchange.headers)


@pytest.mark.parametrize(
    "allowed", ['["https://SITE.example/"]', '["*"]', '["https://else.example", "https://site.example"]']
)
async def test_allowed_origins(allowed: str) -> None:
    """Pages of allowed origins are served and may read responses, including errors."""
    named = rules("--allowed-origins", allowed)
    headers = {"Origin": SITE, "Sec-Fetch-Site": "cross-site"}
    for method, path, status in (("POST", PATH, 200), ("GET", "/nothing", 404)):
        exchange, _ = await ask(named, method, path, "localhost:8000", headers)
        assert exchange.status == status
        assert exchange.headers["access-control-allow-origin"] == SITE
        assert exchange.headers["vary"] == "Origin"
        assert "X-Quipu-Request-Id" in exchange.headers["access-control-expose-headers"]
    exchange, body = await ask(named, "OPTIONS", PATH, "localhost:8000", headers | PREFLIGHT)
    assert (exchange.status, body) == (204, b"")
    assert exchange.headers["access-control-allow-origin"] == SITE
    assert "POST" in exchange.headers["access-control-allow-methods"]
    assert exchange.headers["access-control-allow-headers"] == "authorization,content-type"
    other, _ = await ask(named, "POST", PATH, "localhost:8000", {"Origin": "https://third.example"})
    assert other.status == (200 if "*" in allowed else 403)


async def test_preflight_with_keys() -> None:
    """A preflight needs no key; the request after it does. Other origins learn nothing."""
    named = rules("--allowed-origins", f'["{SITE}"]', has_keys=True)
    key = KeyEntry(id="k", name="k", tenant="t", sha256=hash_key("sk-1"))
    exchange, _ = await ask(named, "OPTIONS", PATH, "quipu.example", {"Origin": SITE, **PREFLIGHT}, key)
    assert exchange.status == 204
    exchange, _ = await ask(named, "POST", PATH, "quipu.example", {"Origin": SITE}, key)
    assert exchange.status == 401 and exchange.headers["access-control-allow-origin"] == SITE
    other = {"Origin": "https://third.example"}
    exchange, _ = await ask(named, "OPTIONS", PATH, "quipu.example", other | PREFLIGHT, key)
    assert exchange.status == 401
    exchange, _ = await ask(named, "POST", PATH, "quipu.example", other | {"x-api-key": "sk-1"}, key)
    assert exchange.status == 200 and "access-control-allow-origin" not in exchange.headers


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", PATH, b"{", 400),
        ("POST", PATH, b"\xff\x00", 400),
        ("GET", "/metrics", b"", 403),
        ("GET", "/nothing", b"", 404),
        ("POST", PATH, b'{"model": "gpt-5"}', 404),
        ("GET", PATH, b"", 405),
        ("POST", PATH, b" " * 2000, 413),
        ("POST", "/v1/messages", b" " * 2000, 413),
        ("POST", PATH, json.dumps(BODY).encode(), 503),
    ],
)
async def test_refusals_are_readable(method: str, path: str, body: bytes, status: int) -> None:
    """A page of an allowed origin may read each refusal, and no other page any."""
    options = AppOptions(browsers=rules("--allowed-origins", f'["{SITE}"]', has_keys=True), max_body_bytes=1000)
    key = KeyEntry(id="k", name="k", tenant="t", sha256=hash_key("sk-1"))
    desk = FakeDesk()
    if status == 503:
        desk.closed = "it stops"
    client = Client(make_app(desk, options, KeyStore([key])))
    for origin in (SITE, "https://third.example"):
        async with client.open(method, path, body, {"Origin": origin, "x-api-key": "sk-1"}) as exchange:
            await exchange.wait_started()
            await exchange.read()
        assert exchange.status == status
        assert exchange.headers.get("access-control-allow-origin") == (SITE if origin == SITE else None)


@pytest.mark.parametrize(
    ("origin", "host", "expected"),
    [
        ("http://a.example", "a.example", True),
        ("http://a.example:80", "a.example", True),
        ("https://a.example", "a.example:443", True),
        ("https://A.example", "a.example", True),
        ("https://a.example", "a.example:80", False),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://a.example@b.example", "b.example", False),
        ("ftp://a.example", "a.example", False),
        ("a.example", "a.example", False),
        ("", "", False),
    ],
)
def test_same_origin(origin: str, host: str, expected: bool) -> None:
    """An origin is host name and port, including default ports."""
    assert is_same_origin(origin, host) == expected


@pytest.mark.parametrize("text", ["https://site.example", "{}", "[1]", '[""]', "[", '"*"'])
def test_invalid_origins_flag(text: str) -> None:
    """An invalid list of origins is refused at startup."""
    with pytest.raises(argparse.ArgumentTypeError):
        parse_origins(text)


@pytest.mark.parametrize("text", ["", "a,,b", "http://a.example", "a b"])
def test_invalid_hosts_flag(text: str) -> None:
    """An invalid list of hosts is refused at startup."""
    with pytest.raises(argparse.ArgumentTypeError):
        parse_hosts(text)
