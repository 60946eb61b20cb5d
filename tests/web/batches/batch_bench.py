"""Helper for tests of files and batches: the whole application over a small runtime, with files in a temporary folder.

A server is killed by copying its folder and its journal at that moment (`Bench.snapshot`); what happens to it
afterwards does not matter, and a new one is started from the copy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from quipu.actors.messages.outcomes import Fault, Outcome
from quipu.actors.messages.usage_record import UsageRecord
from quipu.kernels.fake import Dials
from quipu.web.app import QuipuApp, make_app
from quipu.web.auth.keys import KeyStore
from quipu.web.batches.batch_service import BatchService
from quipu.web.batches.batch_store import BatchStore
from quipu.web.batches.batch_values import BatchLimits
from quipu.web.options import AppOptions
from tests.journals import KeptJournal
from tests.runtimes import Client, eventually, small_runtime
from tests.web.asgi_client import Client as HttpClient

COMPLETIONS = "/v1/completions"
BOUNDARY = "knots"
ENDED = ("completed", "failed", "expired", "cancelled")


class Clock:
    """Unix time that a test sets."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@attrs.define(eq=False)
class Bench:
    folder: Path
    journal: KeptJournal
    service: BatchService
    app: QuipuApp
    client: Client
    clock: Clock

    @property
    def http(self) -> HttpClient:
        return HttpClient(self.app)

    async def request(
        self, method: str, path: str, body: object = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return status and JSON."""
        async with self.http.open(method, path, body, headers) as exchange:
            answer = await exchange.json()
            return exchange.status, answer

    async def upload(self, data: bytes, headers: dict[str, str] | None = None, **fields: str) -> tuple[int, Any]:
        sent = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", **(headers or {})}
        return await self.request("POST", "/v1/files", form({"purpose": "batch", **fields}, data), sent)

    async def content(self, file_id: str, headers: dict[str, str] | None = None) -> bytes:
        async with self.http.open("GET", f"/v1/files/{file_id}/content", headers=headers) as exchange:
            assert await exchange.wait_started() == 200
            return await exchange.read()

    async def start(self, data: bytes, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """Upload a file and create a batch, which is returned."""
        status, file = await self.upload(data, headers)
        assert status == 200, file
        body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
        status, batch = await self.request("POST", "/v1/batches", body, headers)
        assert status == 200, batch
        return batch

    async def batch(self, batch_id: str, headers: dict[str, str] | None = None) -> Any:
        status, batch = await self.request("GET", f"/v1/batches/{batch_id}", headers=headers)
        assert status == 200, batch
        return batch

    async def ended(self, batch_id: str, headers: dict[str, str] | None = None) -> Any:
        """Wait for the end of a batch, and return it."""
        with trio.fail_after(60):
            while (batch := await self.batch(batch_id, headers))["status"] not in ENDED:
                await trio.sleep(0.01)
        return batch

    async def results(self, batch: Any, headers: dict[str, str] | None = None) -> list[Any]:
        """Return the lines of both result files."""
        lines: list[Any] = []
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is not None:
                lines += map(json.loads, (await self.content(batch[name], headers)).splitlines())
        return lines

    async def snapshot(self, to: Path) -> KeptJournal:
        """Copy folder and journal as they are, as if the server were killed now."""
        journal = KeptJournal(closed=list(self.journal.closed))
        await self.service.call(shutil.copytree, self.folder, to)
        for record in self.journal.open.values():
            journal.closed.append(attrs.evolve(record, outcome=Outcome.FAILED, fault=Fault.RECOVERED))
        return journal


def form(fields: dict[str, str], data: bytes, filename: str = "in.jsonl") -> bytes:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'
    return b"".join(parts) + head.encode() + data + f"\r\n--{BOUNDARY}--\r\n".encode()


def line(number: int, url: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": [1 + number, 2, 3], "max_tokens": 4, "temperature": 0, **fields}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def jsonl(lines: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def billed(journal: KeptJournal) -> list[UsageRecord]:
    """Return the records that count tokens in reports."""
    return [record for record in journal.closed if record.fault is None and record.completion_tokens]


@asynccontextmanager
async def batch_server(
    folder: Path,
    journal: KeptJournal | None = None,
    *,
    limits: BatchLimits | None = None,
    keys: KeyStore | None = None,
    dials: Dials | None = None,
    make_service: Callable[..., BatchService] = BatchService,
    clock: Clock | None = None,
    **changes: Any,
) -> AsyncIterator[Bench]:
    """Run a server with batches until the block is left."""
    journal = KeptJournal() if journal is None else journal
    kept, clock = journal, clock or Clock()

    async def find_recorded(request_ids: Sequence[str]) -> Collection[str]:
        await trio.lowlevel.checkpoint()
        return {r.request_id for r in kept.closed if r.request_id in request_ids and r.fault is None}

    async with small_runtime(dials or Dials(step_seconds=0.0), journal=journal, **changes) as client:
        store = BatchStore(folder)
        service = make_service(store, limits or BatchLimits(), find_recorded, clock)
        service.retry_s, service.stop_s = 0.01, 0.2
        app = make_app(client.runtime.desk, AppOptions(), keys, batches=service)
        try:
            async with service.serving(app):
                yield Bench(folder, journal, service, app, client, clock)
        finally:
            store.close()


async def settled(bench: Bench) -> None:
    """Wait until no request is open."""
    await eventually(lambda: not bench.client.runtime.entry_store.num_open_accounts, "all accounts are closed")
