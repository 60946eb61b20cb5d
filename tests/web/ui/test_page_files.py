"""The files of the pages: what their responses tell the browser, and that nothing else can be reached through them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from quipu.actors.messages.block_manager import MissReason
from quipu.web.app import QuipuApp, make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from quipu.web.options import AppOptions
from quipu.web.ui.static_files import FOLDER, read_files
from tests.web.api.admin.usage_books import BookSource
from tests.web.asgi_client import Client, Exchange
from tests.web.fakes import FakeDesk

FILES = sorted(read_files())
KEYS = {"acme": "sk-of-acme", "ops": "sk-of-ops"}
VENDORED = FOLDER / "vendor"


def keyed() -> KeyStore:
    return KeyStore(
        [
            KeyEntry(id=f"id-{tenant}", name=f"{tenant}'s", tenant=tenant, sha256=hash_key(key), admin=tenant == "ops")
            for tenant, key in KEYS.items()
        ]
    )


def app_with(keys: KeyStore | None = None, **options: Any) -> QuipuApp:
    return make_app(FakeDesk(), AppOptions(**options), keys, usage=BookSource())


async def get(app: Any, path: str, **headers: str) -> tuple[Exchange, bytes]:
    async with Client(app).open("GET", path, headers=headers) as exchange:
        await exchange.wait_started()
        return exchange, await exchange.read()


async def test_page_and_redirect() -> None:
    """`/ui` redirects to the page below it by a relative URL, so a proxy may add a prefix."""
    exchange, _ = await get(app_with(), "/ui")
    assert (exchange.status, exchange.headers["location"]) == (308, "ui/")
    exchange, body = await get(app_with(), "/ui/")
    assert (exchange.status, exchange.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert body == (FOLDER / "index.html").read_bytes()


@pytest.mark.parametrize("name", FILES)
async def test_every_file(name: str) -> None:
    """Each file is sent unchanged with its type, which browsers may not guess; they must revalidate their copies."""
    exchange, body = await get(app_with(keyed()), f"/ui/static/{name}")
    assert exchange.status == 200
    assert body == (FOLDER / name).read_bytes()
    assert exchange.headers["x-content-type-options"] == "nosniff"
    assert exchange.headers["referrer-policy"] == "no-referrer"
    assert exchange.headers["cache-control"] == "no-cache"
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}
    assert exchange.headers["content-type"].partition(";")[0] == kinds.get(Path(name).suffix, "text/html")


async def test_policy() -> None:
    """The policy forbids inline code, other origins, frames, and strings that become markup."""
    exchange, _ = await get(app_with(), "/ui/")
    policy = dict(rule.split(" ", 1) for rule in exchange.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


async def test_unchanged_file_is_not_sent_again() -> None:
    """A browser that has a file gets 304; with another version of it, the file."""
    exchange, body = await get(app_with(), "/ui/static/app.js")
    again, nothing = await get(app_with(), "/ui/static/app.js", **{"If-None-Match": exchange.headers["etag"]})
    assert (again.status, nothing, again.headers["etag"]) == (304, b"", exchange.headers["etag"])
    assert "content-security-policy" in again.headers
    other, whole = await get(app_with(), "/ui/static/app.js", **{"If-None-Match": '"other"'})
    assert (other.status, whole) == (200, body)


@pytest.mark.parametrize(
    "name",
    ["nothing.js", "../routes.py", "%2e%2e/routes.py", "..%2froutes.py", "vendor", "vendor/", "/etc/passwd", "."],
)
async def test_no_other_file(name: str) -> None:
    """A name is only looked up among the files of the folder: no path leads out of it."""
    exchange, body = await get(app_with(), f"/ui/static/{name}")
    assert exchange.status == 404
    assert b"import" not in body


async def test_no_ui() -> None:
    """Without the pages their paths are unknown URLs, which need a key if there are keys."""
    for path in ("/ui", "/ui/", "/ui/static/app.js", "/ui/session", "/ui/usage"):
        assert (await get(app_with(serves_ui=False), path))[0].status == 404
        assert (await get(app_with(keyed(), serves_ui=False), path))[0].status == 401


async def test_session() -> None:
    """The owner of a key is told the tenant and what the key may see; a client without one is told nothing."""
    app = app_with(keyed())
    assert (await get(app, "/ui/session"))[0].status == 401
    for tenant, is_admin in (("acme", False), ("ops", True)):
        _, answer = await Client(app).get("/ui/session", {"x-api-key": KEYS[tenant]})
        assert answer["needs_key"]
        assert (answer["tenant"], answer["key_id"], answer["key_name"]) == (tenant, f"id-{tenant}", f"{tenant}'s")
        assert (answer["is_admin"], answer["shows_live"]) == (is_admin, is_admin)
        assert answer["shows_usage"] and answer["shows_cache"]
    _, answer = await Client(app_with()).get("/ui/session")
    assert not answer["needs_key"]
    assert answer["shows_live"] and answer["shows_usage"] and answer["shows_cache"]
    _, answer = await Client(app_with()).get("/ui/session", {"X-Forwarded-For": "192.0.2.1"})
    assert (answer["shows_live"], answer["shows_usage"], answer["shows_cache"]) == (True, False, False)


def test_page_loads_only_its_own_files() -> None:
    """Everything that the page and its scripts load exists on this server, and nothing is inline."""
    page = (FOLDER / "index.html").read_text()
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert loaded and all((FOLDER.parent / path).is_file() for path in loaded)
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page)
    for path in FOLDER.rglob("*.js"):
        for name in re.findall(r'(?:from\s*|import\s*\(?)"([^"]*)"', path.read_text()):
            assert name.startswith("./") and (path.parent / name).is_file(), (path.name, name)


def test_vendored_files() -> None:
    """Each library is the file whose version and digest are noted, and has its licence beside it."""
    noted = dict(re.findall(r"^([0-9a-f]{64})  (\S+)$", (VENDORED / "VERSIONS.txt").read_text(), re.MULTILINE))
    found = {hashlib.sha256(path.read_bytes()).hexdigest(): path.name for path in VENDORED.glob("*.js")}
    assert noted == found
    assert "MIT License" in (VENDORED / "preact.LICENSE.txt").read_text()
    assert "Apache License" in (VENDORED / "htm.LICENSE.txt").read_text()


def test_every_reason_of_a_miss_has_words() -> None:
    """The playground has a sentence for each reason that an engine can give."""
    words = (FOLDER / "explain.js").read_text()
    known = words[words.index("const REASONS = {") : words.index("};")]
    assert set(re.findall(r"^  (\w+):", known, re.MULTILINE)) == {reason.value for reason in MissReason}
