"""Helpers of the traps about retries: requests over HTTP that are recorded in a real ledger, and its reports."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import trio
import trio.testing

from quipu.actors.ledger.reading import open_reader
from quipu.actors.ledger.service import LedgerConfig, open_ledger
from quipu.actors.messages.usage_record import UsageRecord
from quipu.kernels.fake import Dials
from quipu.web.api.admin.usage_buckets import rfc3339
from tests.runtimes import Client, engines_apart, small_runtime
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle
from tests.web.api.admin.usage_books import ANTHROPIC, OPENAI, FolderSource, client_of, get_report
from tests.web.asgi_client import Client as HttpClient

REQUEST: Final = body(prompt_of(50))
KEY: Final = {"Idempotency-Key": "8e03978e"}


@attrs.frozen
class Bill:
    """The sums of a usage report over a ledger."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0


@attrs.define
class BilledRuntime:
    """A runtime whose requests are recorded in a ledger."""

    client: Client
    http: HttpClient
    ids: list[str] = attrs.field(factory=list)
    """The ids of the requests so far."""

    async def send(self, headers: dict[str, str] | None = None, **fields: Any) -> int:
        """Send one request to its end and return the status."""
        async with self.http.open("POST", COMPLETIONS, {**REQUEST, **fields}, headers or {}) as exchange:
            status = await exchange.wait_started()
            self.ids.append(exchange.headers["x-quipu-request-id"])
            await exchange.read()
        await settle(self.client)
        return status

    async def send_and_leave(self, headers: dict[str, str] | None = None, **fields: Any) -> None:
        """Start a stream whose client leaves after the first chunk."""
        async with self.streaming(headers, **fields) as exchange:
            exchange.leave()
            await trio.testing.wait_all_tasks_blocked()
        await settle(self.client)

    @asynccontextmanager
    async def streaming(self, headers: dict[str, str] | None = None, **fields: Any) -> AsyncIterator[Any]:
        """Open a stream that has started."""
        wanted = {**REQUEST, "max_tokens": 300, **STREAMED, **fields}
        async with self.http.open("POST", COMPLETIONS, wanted, headers or {}) as exchange:
            assert await exchange.wait_started() == 200
            self.ids.append(exchange.headers["x-quipu-request-id"])
            await exchange.read_some()
            yield exchange

    @property
    def num_generated(self) -> int:
        """The number of generated tokens by the counter, which is independent of keys."""
        return int(samples(self.client)["generation_tokens_total"])

    @property
    def num_prompt_tokens(self) -> int:
        return int(samples(self.client)["prompt_tokens_total"])


@asynccontextmanager
async def open_billed_runtime(folder: Path, dials: Dials | None = None, **changes: Any) -> AsyncIterator[BilledRuntime]:
    if not engines_apart.get():  # engines have roles only where requests outlive them
        changes = {"on_engine_death": "fail", **changes}
    async with (
        open_ledger(LedgerConfig(folder)) as ledger,
        small_runtime(dials or Dials(step_seconds=0.001), journal=ledger.journal, **changes) as client,
    ):
        yield BilledRuntime(client, over_http(client))


def records_of(folder: Path, ids: list[str]) -> list[UsageRecord]:
    with open_reader(data_dir=folder) as reader:
        found = {each.record.request_id: each.record for each in reader.records()}
    return [found[request_id] for request_id in ids]


async def bill_of(folder: Path, **parameters: str) -> Bill:
    """Return the sums of OpenAI's report, after checking that Anthropic's agrees."""
    now = time.time()
    since = int(now) - 3600
    client = client_of(FolderSource(folder), now=now)
    page = await get_report(client, OPENAI, {"start_time": since, "limit": 31, **parameters})
    bill = Bill()
    for result in (result for bucket in page["data"] for result in bucket["results"]):
        bill = Bill(
            bill.requests + result["num_model_requests"],
            bill.prompt + result["input_tokens"],
            bill.cached + result["input_cached_tokens"],
            bill.output + result["output_tokens"],
        )
    page = await get_report(client, ANTHROPIC, {"starting_at": rfc3339(since), "limit": 31, **parameters})
    results = [result for bucket in page["data"] for result in bucket["results"]]
    cached = sum(result["cache_read_input_tokens"] for result in results)
    assert cached == bill.cached
    assert sum(result["uncached_input_tokens"] for result in results) + cached == bill.prompt
    assert sum(result["output_tokens"] for result in results) == bill.output
    return bill
