"""Apps with a response store, for tests: the official client and raw requests, without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import openai

from quipu.actors.response_store.response_store import ResponseStore, StoreConfig, open_store
from quipu.web.app import make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from tests.openai_httpx import httpx
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk


@attrs.frozen
class Stored:
    """An app that stores responses, and its clients."""

    desk: FakeDesk
    store: ResponseStore
    raw: Client
    client: openai.AsyncOpenAI
    other: openai.AsyncOpenAI
    """Of another tenant."""

    async def ask(self, method: str, path: str, body: Any = b"", key: str = "a") -> tuple[int, Any]:
        async with self.raw.open(method, path, body, {"Authorization": f"Bearer {key}"}) as exchange:
            answer = await exchange.json()
            return exchange.status, answer


@asynccontextmanager
async def storing(folder: Path, desk: Any = None, **changes: Any) -> AsyncIterator[Stored]:
    """Open an app with keys `a` and `b` of two tenants. `changes` are made to the store's config."""
    desk = FakeDesk() if desk is None else desk
    keys = KeyStore([KeyEntry(id=key, name=key, tenant=key, sha256=hash_key(key), admin=False) for key in "ab"])
    async with open_store(StoreConfig(data_dir=folder, **{"ttl_s": 1000.0, **changes})) as store:
        app = make_app(desk, keys=keys, store=store)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http:
            clients = [
                openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0)
                for key in "ab"
            ]
            yield Stored(desk, store, Client(app), *clients)
