"""Trap: a request that the server itself failed is charged, and its retry is charged again.

Here the attempt that the server failed counts as a request without tokens, with an idempotency key or without. Its
record keeps the true numbers and the fault; with a key the second attempt's record names the first, and
`retries=collapse` counts the two once.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

from quipu.actors.ledger.reconciling import parse_metrics, reconcile
from quipu.actors.messages.outcomes import ErrorKind, Fault, Outcome, RequestError
from quipu.kernels.fake import Dials
from tests.runtimes import Client, kill_engine
from tests.traps.bills import KEY, Bill, BilledRuntime, bill_of, open_billed_runtime, records_of
from tests.traps.wire import settle

NO_KEY: dict[str, str] = {}


async def fail_in_midstream(billed: BilledRuntime, fault: Fault, headers: dict[str, str]) -> None:
    """Have the server fail a stream while its client reads it."""
    async with billed.streaming(headers) as exchange:
        if fault is Fault.ENGINE_DIED:
            kill_serving_engine(billed.client)
        else:
            billed.client.dials.fail_steps = 2
        await exchange.read()
    await recover(billed)


def kill_serving_engine(client: Client) -> None:
    """Kill the engine that has the only sequence."""
    (index,) = [index for index, engine in enumerate(client.engines) if engine.batcher.sequences]
    kill_engine(client, index)


async def recover(billed: BilledRuntime) -> None:
    """Start the next engine if the current one has died."""
    runtime = billed.client.runtime
    with trio.fail_after(60):
        while runtime.entry_store.num_open_accounts or not runtime.desk.health().is_ready:
            await trio.sleep(0.01)
    await settle(billed.client)


@pytest.mark.parametrize("headers", [KEY, NO_KEY], ids=["key", "no key"])
async def test_retry_after_a_failed_step(tmp_path: Path, headers: dict[str, str]) -> None:
    """The bill has two requests, and the tokens of the one that was served."""
    await fail_and_serve(tmp_path, Fault.STEP_FAILED, headers)


@pytest.mark.parametrize("headers", [KEY, NO_KEY], ids=["key", "no key"])
async def test_retry_after_an_engine_death(tmp_path: Path, headers: dict[str, str]) -> None:
    """Likewise."""
    await fail_and_serve(tmp_path, Fault.ENGINE_DIED, headers)


async def fail_and_serve(tmp_path: Path, fault: Fault, headers: dict[str, str]) -> None:
    async with open_billed_runtime(tmp_path) as billed:
        await fail_in_midstream(billed, fault, headers)
        assert await billed.send(headers, max_tokens=300, stream=True) == 200
        generated = billed.num_generated
    failed, served = records_of(tmp_path, billed.ids)
    assert (failed.outcome, failed.fault) == (Outcome.FAILED, fault)
    assert failed.prompt_tokens == 50 and 0 < failed.completion_tokens < 300, "its record has the true numbers"
    assert (served.outcome, served.fault, served.completion_tokens) == (Outcome.FINISHED, None, 300)
    assert generated == failed.completion_tokens + 300
    assert await bill_of(tmp_path) == Bill(2, 50, served.cached_tokens or 0, 300)


async def test_retry_names_the_first_request(tmp_path: Path) -> None:
    """Same body, same key: `retry_of` links them, and the collapsed report counts one of them."""
    async with open_billed_runtime(tmp_path) as billed:
        await fail_in_midstream(billed, Fault.STEP_FAILED, KEY)
        async with billed.streaming(KEY) as exchange:
            await exchange.read()
        await settle(billed.client)
    failed, served = records_of(tmp_path, billed.ids)
    assert (failed.retry_of, served.retry_of) == (None, failed.request_id)
    expected = Bill(2, 50, served.cached_tokens or 0, 300)
    assert await bill_of(tmp_path) == expected
    assert await bill_of(tmp_path, retries="collapse") == Bill(1, 50, expected.cached, 300)


async def test_retry_after_a_crash(tmp_path: Path) -> None:
    """A server crashes with open requests: the next one closes their records, and they count no tokens."""
    crashed = tmp_path / "crashed"
    async with open_billed_runtime(tmp_path / "first") as billed, billed.streaming(KEY):
        shutil.copytree(tmp_path / "first", crashed)  # as after a kill
    async with open_billed_runtime(crashed) as later:
        async with later.streaming(KEY) as exchange:
            await exchange.read()
        await settle(later.client)
    recovered, served = records_of(crashed, billed.ids + later.ids)
    assert (recovered.outcome, recovered.fault, recovered.prompt_tokens) == (Outcome.FAILED, Fault.RECOVERED, 50)
    assert (served.retry_of, served.fault) == (recovered.request_id, None)
    assert await bill_of(crashed) == Bill(2, 50, 0, 300)
    assert await bill_of(crashed, retries="collapse") == Bill(1, 50, 0, 300)


async def test_ledger_keeps_the_true_numbers(tmp_path: Path) -> None:
    """Counters and `quipu ledger reconcile` ignore faults: both include the work that was computed."""
    async with open_billed_runtime(tmp_path) as billed:
        await fail_in_midstream(billed, Fault.STEP_FAILED, KEY)
        live = parse_metrics(billed.client.runtime.metrics.render().decode())
        (account,) = reconcile(data_dir=tmp_path, live=live)
        assert account.agrees
        lines = {line.name: line.ledger for line in account.lines}
    (failed,) = records_of(tmp_path, billed.ids)
    assert lines["prompt_tokens_total"] == 50 and lines["generation_tokens_total"] == failed.completion_tokens > 0
    assert await bill_of(tmp_path) == Bill(1, 0, 0, 0)


async def test_billed_if_not_the_servers_fault(tmp_path: Path) -> None:
    """A client that leaves is billed for the work done, even if the engine dies before it learns of this. So is a
    request that exceeds its deadline."""
    async with open_billed_runtime(tmp_path, Dials(step_seconds=0.02)) as billed:
        await billed.send_and_leave()
        async with billed.streaming() as exchange:
            kill_serving_engine(billed.client)
            exchange.leave()
        await recover(billed)
        async with billed.streaming() as exchange:
            billed.client.runtime.desk.fail(billed.ids[-1], RequestError(ErrorKind.TIMEOUT, "too late"))
            await exchange.read()
        await recover(billed)
    records = records_of(tmp_path, billed.ids)
    assert [record.outcome for record in records] == [Outcome.CANCELLED, Outcome.CANCELLED, Outcome.FAILED]
    assert [record.fault for record in records] == [None, None, None]
    bill = await bill_of(tmp_path)
    assert (bill.requests, bill.prompt) == (3, 150)
    assert bill.output == sum(record.completion_tokens for record in records) >= 3
