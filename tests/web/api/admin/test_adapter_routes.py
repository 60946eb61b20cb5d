"""Loading and unloading adapters over HTTP, which names clients see and may use, and what records say of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from quipu.web.app import make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from quipu.web.options import AppOptions
from tests.actors.engine.adapter_folders import make_folder
from tests.journals import KeptJournal
from tests.runtimes import Client as RuntimeClient
from tests.runtimes import small_runtime
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = list(range(100, 150))
KEYS = KeyStore(
    [
        KeyEntry(id=name, name=name, tenant="tenant", sha256=hash_key(name), admin=name == "admin", adapters=adapters)
        for name, adapters in (("admin", None), ("any", None), ("one", ("one", "gone")), ("none", ()))
    ]
)


@attrs.frozen
class Served:
    client: Client
    runtime: RuntimeClient
    journal: KeptJournal

    async def post(self, path: str, body: object, key: str = "admin", version: str | None = None) -> tuple[int, Any]:
        """Return the status and the body, parsed if it is JSON."""
        headers = {"authorization": f"Bearer {key}"} | ({} if version is None else {"anthropic-version": version})
        async with self.client.open("POST", path, body, headers) as exchange:
            status = await exchange.wait_started()
            data = await exchange.read()
            return status, json.loads(data) if data.startswith(b"{") else data.decode()

    async def names(self, key: str, **headers: str) -> dict[str, Any]:
        """Return what a key sees at /v1/models, by id."""
        _, answer = await self.client.get("/v1/models", {"authorization": f"Bearer {key}", **headers})
        return {entry["id"]: entry for entry in answer["data"]}

    async def complete(self, model: str, key: str = "any") -> tuple[int, Any]:
        return await self.post(
            "/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}, key
        )

    async def load(self, name: str, path: str, **fields: object) -> tuple[int, Any]:
        return await self.post(LOAD, {"lora_name": name, "lora_path": path, **fields})


@asynccontextmanager
async def serving(folder: Path | None, **changes: Any) -> AsyncIterator[Served]:
    journal = KeptJournal()
    async with small_runtime(max_loras=2, journal=journal, **changes) as client:
        app = make_app(client.runtime.desk, AppOptions(lora_dir=folder), KEYS)
        yield Served(Client(app), client, journal)


async def test_life_of_an_adapter(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """An adapter is a model while it is loaded: listed with its parent, served, recorded, in metrics; then unknown."""
    make_folder(tmp_path / "first")
    async with serving(tmp_path) as served:
        assert (await served.complete("one"))[0] == 404
        assert await served.load("one", "first") == (200, "Success: LoRA adapter 'one' added successfully.")
        listed = await served.names("any")
        assert {name: (entry["root"], entry["parent"]) for name, entry in listed.items()} == {
            "demo": ("demo", None),
            "one": ("demo", "demo"),
        }
        assert (await served.names("any", **{"anthropic-version": "2023-06-01"})).keys() == listed.keys()
        _, shown = await served.client.get("/v1/models/one", {"authorization": "Bearer any"})
        assert shown == listed["one"]
        digest = served.runtime.runtime.desk.info.adapters["one"].digest
        texts = set()
        for model in ("demo", "one", "one"):
            status, answer = await served.complete(model)
            assert (status, answer["model"]) == (200, model)
            texts.add((model, answer["choices"][0]["text"]))
        assert len({text for _, text in texts}) == 2
        closed = served.journal.closed
        said = [(record.model, record.adapter, record.parent, record.cached_tokens) for record in closed]
        assert said == [
            ("demo", None, None, 0),
            ("one", digest, "demo", 0),
            ("one", digest, "demo", 48),
        ]
        metrics = served.runtime.runtime.desk.render_metrics().decode()
        assert f'quipu:adapter_info{{adapter="one",digest="{digest}",model_name="demo"}} 1.0' in metrics
        assert 'quipu:adapter_requests_total{adapter="one",model_name="demo"} 2.0' in metrics
        _, stats = await served.client.get("/v1/cache/stats", {"authorization": "Bearer any"})
        assert {(row["model"], row["parent"]) for row in stats["data"]} == {("demo", None), ("one", "demo")}
        assert await served.post(UNLOAD, {"lora_name": "one"}) == (
            200,
            "Success: LoRA adapter 'one' removed successfully.",
        )
        assert (await served.names("any")).keys() == {"demo"}
        assert (await served.complete("one"))[0] == 404
        status, answer = await served.post(UNLOAD, {"lora_name": "one"})
        assert (status, answer["error"]["code"]) == (404, "adapter_not_found")


async def test_every_api(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """All endpoints that generate, count or look up take an adapter's name."""
    make_folder(tmp_path / "first")
    messages = [{"role": "user", "content": "hello"}]
    async with serving(tmp_path) as served:
        await served.load("one", "first")
        for path, body, version in (
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 4}, None),
            ("/v1/responses", {"input": "hello", "max_output_tokens": 16}, None),
            ("/v1/responses/input_tokens", {"input": "hello"}, None),
            ("/v1/messages", {"messages": messages, "max_tokens": 4}, "2023-06-01"),
            ("/v1/messages/count_tokens", {"messages": messages}, "2023-06-01"),
        ):
            for key, expected in (("any", 200), ("one", 200), ("none", 404)):
                status, answer = await served.post(path, {"model": "one", **body}, key, version)
                assert status == expected, (path, answer)
        digests = {record.adapter for record in served.journal.closed}
        assert digests == {served.runtime.runtime.desk.info.adapters["one"].digest}
        found = {}
        await served.complete("one")
        for model in ("one", "demo"):
            line = {"url": "/v1/completions", "body": {"model": model, "prompt": PROMPT}}
            _, answer = await served.post("/v1/cache/lookup", line, "any")
            found[model] = answer["prompts"][0]["cached_tokens"]
        assert found == {"one": 48, "demo": 0}


async def test_permissions(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """A key with `adapters` sees and uses those alone; others do not exist for it. Only admins load and unload."""
    for name in ("one", "two"):
        make_folder(tmp_path / name, name)
    async with serving(tmp_path) as served:
        for name in ("one", "two"):
            await served.load(name, name)
        for key, allowed in (("any", {"one", "two"}), ("one", {"one"}), ("none", set())):
            assert (await served.names(key)).keys() == {"demo", *allowed}
            assert (await served.complete("demo", key))[0] == 200
            for name in ("one", "two"):
                status, answer = await served.complete(name, key)
                assert status == (200 if name in allowed else 404)
                if status == 404:
                    assert answer == (await served.complete("never", key))[1] | {"error": answer["error"]}, (
                        "as a name that nobody has"
                    )
                    assert "two" not in answer["error"]["message"].replace(f'"{name}"', "")
            for path in (LOAD, UNLOAD):
                assert (await served.post(path, {"lora_name": "one"}, key))[0] == 403


async def test_reload_in_place(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """`load_inplace` replaces what a name stands for; without it a name that is taken is refused."""
    make_folder(tmp_path / "first")
    async with serving(tmp_path) as served:
        await served.load("one", "first")
        _, before = await served.complete("one")
        make_folder(tmp_path / "first", "other bytes")
        status, answer = await served.load("one", "first")
        assert (status, answer["error"]["code"]) == (400, "adapter_refused")
        assert (await served.load("one", "first", load_inplace=True))[0] == 200
        _, after = await served.complete("one")
        assert after["choices"][0]["text"] != before["choices"][0]["text"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_paths(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """Nothing outside of the folder is read, by whatever path; what does not exist is answered in the same way."""
    allowed, outside = tmp_path / "allowed", make_folder(tmp_path / "outside")
    allowed.mkdir()
    make_folder(allowed / "first")
    (allowed / "link").symlink_to(outside)
    (allowed / "inner").symlink_to(allowed / "first")
    (allowed / "circle").symlink_to(allowed / "circle")
    (allowed / "file").write_text("x")
    async with serving(allowed) as served:
        answers = [
            await served.load("one", path)
            for path in (
                *("../outside", str(outside), "link", "first/../../outside", "missing", "circle", "file", ".", ""),
                *("/", "a\0b", "x" * 5000),
            )
        ]
        assert {(status, answer["error"]["code"], answer["error"]["message"]) for status, answer in answers} == {
            (400, "path_not_allowed", "Invalid value for `lora_path`: must be a folder within the server's --lora-dir.")
        }
        assert (await served.load("one", str(allowed / "first")))[0] == 200
        assert (await served.load("two", "inner"))[0] == 200
    async with serving(None) as served:
        status, answer = await served.load("one", str(allowed / "first"))
        assert status == 400 and "--lora-dir" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"lora_path": "first"}, "missing_required_parameter"),
        ({"lora_name": "one"}, "missing_required_parameter"),
        ({"lora_name": 1, "lora_path": "first"}, "invalid_type"),
        ({"lora_name": "one", "lora_path": ["first"]}, "invalid_type"),
        ({"lora_name": "one", "lora_path": "first", "load_inplace": "yes"}, "invalid_type"),
        ({"lora_name": "", "lora_path": "first"}, "invalid_value"),
        ({"lora_name": "a b", "lora_path": "first"}, "invalid_value"),
        ({"lora_name": "a\n", "lora_path": "first"}, "invalid_value"),
        ({"lora_name": "x" * 200, "lora_path": "first"}, "invalid_value"),
        ({"lora_name": "demo", "lora_path": "first"}, "invalid_value"),
        ({"lora_name": "one", "lora_path": "empty"}, "adapter_refused"),
    ],
    ids=str,
)
async def test_refusals(autojump_clock: trio.abc.Clock, tmp_path: Path, body: dict[str, Any], code: str) -> None:
    """Name the field that is wrong, or what is wrong with the files."""
    make_folder(tmp_path / "first")
    (tmp_path / "empty").mkdir()
    async with serving(tmp_path) as served:
        status, answer = await served.post(LOAD, body)
        assert (status, answer["error"]["code"]) == (400, code)
        assert (await served.names("any")).keys() == {"demo"}


async def test_not_enabled() -> None:
    """A server without adapters says which flag it lacks."""
    client = Client(make_app(FakeDesk()))
    for path in (LOAD, UNLOAD):
        exchange, answer = await client.post(path, {"lora_name": "one", "lora_path": "first"})
        assert (exchange.status, answer["error"]["code"]) == (400, "adapters_not_enabled")
        assert "--enable-lora" in answer["error"]["message"]
