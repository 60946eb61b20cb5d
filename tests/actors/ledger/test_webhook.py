"""The usage webhook: every record reaches the receiver at least once, whatever the receiver or a restart does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog

from quipu.actors.ledger import webhook
from quipu.actors.ledger.cloud_events import cloud_event
from quipu.actors.ledger.database import LedgerError
from quipu.actors.ledger.folder import FOLDER
from quipu.actors.ledger.reading import LedgerRecord, Query, open_reader
from quipu.actors.ledger.service import Ledger
from quipu.actors.ledger.webhook import WebhookConfig
from quipu.actors.messages.counts import UNKNOWN, Estimate, Known
from quipu.actors.messages.outcomes import Fault, Outcome
from tests.actors.ledger.ledgers import record_of
from tests.actors.ledger.open_ledgers import opened, write
from tests.actors.ledger.webhook_receiver import Receiver, receiving


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_PAUSE_S", "MAX_PAUSE_S", "POLL_S"):
        monkeypatch.setattr(webhook, name, 0.002)


def event_of(**changes: Any) -> dict[str, Any]:
    event: dict[str, Any] = orjson.loads(
        cloud_event(LedgerRecord(record_of("req-1", **changes), "srv-1", 3, "ab", recovered=False), "led-1")
    )
    return event


def config_of(receiver: Receiver, key: str | None = None) -> dict[str, Any]:
    return {"webhook": WebhookConfig(receiver.url, key)}


async def delivered(receiver: Receiver, ledger: Ledger, number: int) -> None:
    """Wait until the ledger knows that so many events have arrived."""
    await receiver.wait(lambda: ledger.webhook is not None and ledger.webhook.num_delivered == number)


def test_event() -> None:
    """An event has CloudEvents' attributes, the tenant as subject, and the record as the ledger has it."""
    event = event_of()
    data = event.pop("data")
    assert event == {
        "specversion": "1.0",
        "id": "req-1",
        "source": "urn:quipu:ledger:led-1",
        "type": "quipu.usage",
        "subject": "acme",
        "time": "2023-11-14T22:13:22.000000Z",
        "datacontenttype": "application/json",
    }
    assert (data["model"], data["counted"]["prompt_tokens"], data["counted"]["completion_tokens"]) == ("demo", 100, 10)
    assert (data["endpoint"], data["kind"]) == ("completions", "generate")
    assert (data["record"]["number"], data["record"]["cached_device_tokens"]) == (3, 48)


@pytest.mark.parametrize(
    ("changes", "cached", "completion"),
    [
        ({}, 48, 10),
        ({"cached": Estimate(48)}, 0, 10),
        ({"cached": UNKNOWN, "cached_by_tier": None}, 0, 10),
        ({"fault": Fault.STEP_FAILED, "outcome": Outcome.FAILED}, 0, 0),
        ({"prompt": Known(200), "cached": Known(0), "cached_by_tier": {}}, 0, 10),
    ],
)
async def test_counted_is_what_reports_count(
    tmp_path: Path, changes: dict[str, Any], cached: int, completion: int
) -> None:
    """`counted` is the report over this record: nothing for what the server failed, and no estimates."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "req-1", **changes)
        with open_reader(data_dir=tmp_path) as reader:
            (report,) = reader.sums(Query())
    counted = event_of(**changes)["data"]["counted"]
    assert (counted["cached_tokens"], counted["completion_tokens"]) == (cached, completion)
    assert {name: getattr(report, name) for name in counted} == counted


async def test_each_record_is_delivered(tmp_path: Path) -> None:
    """Every record is sent once while all goes well, more than a page of them, with the key and the content type."""
    names = [f"req-{at}" for at in range(webhook.PAGE + 10)]
    async with receiving() as receiver, opened(tmp_path, **config_of(receiver, "k1")) as ledger:
        await write(ledger, *names)
        await delivered(receiver, ledger, len(names))
        assert sorted(receiver.ids) == sorted(names)
        assert receiver.num_connections <= webhook.NUM_SENDERS
        assert receiver.headers[0]["authorization"] == "Bearer k1"
        assert receiver.headers[0]["content-type"].startswith("application/cloudevents+json")


async def test_restarts_continue(tmp_path: Path) -> None:
    """What was not delivered before a stop is delivered after it, over several starts, and what was is not repeated.

    Records from before the webhook was configured are not sent.
    """
    async with opened(tmp_path) as ledger:
        await write(ledger, "before")
    async with receiving() as receiver:
        async with opened(tmp_path, **config_of(receiver)) as ledger:
            await write(ledger, "first")
            await delivered(receiver, ledger, 1)
        for name in ("second", "third"):
            async with opened(tmp_path) as ledger:
                await write(ledger, name)
        async with opened(tmp_path, **config_of(receiver)) as ledger:
            await write(ledger, "fourth")
            await delivered(receiver, ledger, 3)
        assert receiver.ids == ["first", "second", "third", "fourth"]


async def test_recovered_record_is_delivered(tmp_path: Path) -> None:
    """A request whose server died is sent by the next one, counting no tokens."""
    async with receiving() as receiver:
        async with opened(tmp_path, **config_of(receiver)) as ledger:
            await write(ledger, "done")
            await write(ledger, "lost", closes=False)
            await delivered(receiver, ledger, 1)
        async with opened(tmp_path, **config_of(receiver)):
            await receiver.wait(lambda: len(receiver.ids) >= 2)
        event = receiver.accepted[1]
        assert event["id"] == "lost" and event["data"]["fault"] == "recovered"
        assert event["data"]["counted"]["prompt_tokens"] == 0 < event["data"]["record"]["prompt_tokens"]


@pytest.mark.parametrize("status", [0, 302, 401, 404, 429, 500, 503])
async def test_receiver_in_trouble(tmp_path: Path, status: int) -> None:
    """Events wait while a receiver answers anything but that it has them, and nothing is lost or given up."""
    async with receiving() as receiver, opened(tmp_path, **config_of(receiver)) as ledger:
        assert ledger.webhook is not None
        receiver.answer = lambda _: status
        with structlog.testing.capture_logs() as logs:
            await write(ledger, "req-1", "req-2")
            await receiver.wait(lambda: len(receiver.attempts) > 4 * webhook.REFUSED_TRIES)
            assert ledger.webhook.trouble is not None and not receiver.ids
            receiver.answer = lambda _: 200
            await receiver.wait(lambda: len(receiver.ids) == 2)
            await delivered(receiver, ledger, 2)
        events = [line["event"] for line in logs if line["event"].startswith("usage_webhook")]
        assert (events[0], events[-1]) == ("usage_webhook.away", "usage_webhook.back") and len(events) <= 4
        assert ledger.webhook.num_given_up == 0


async def test_refused_event_does_not_hold_up_others(tmp_path: Path) -> None:
    """An event that the receiver calls invalid is given up, logged with its id and counted; the others arrive."""
    async with receiving() as receiver, opened(tmp_path, **config_of(receiver)) as ledger:
        receiver.answer = lambda event: 422 if event["id"] == "req-1" else 204
        with structlog.testing.capture_logs() as logs:
            await write(ledger, "req-0", "req-1", "req-2")
            await receiver.wait(lambda: ledger.webhook is not None and ledger.webhook.num_given_up == 1)
            await write(ledger, "req-3")
            await receiver.wait(lambda: len(receiver.ids) == 3)
        (given_up,) = [line for line in logs if line["event"] == "usage_webhook.given_up"]
        assert given_up["request_id"] == "req-1" and "422" in given_up["why"]
        assert sorted(receiver.ids) == ["req-0", "req-2", "req-3"]
        assert [event["id"] for event in receiver.attempts].count("req-1") == webhook.REFUSED_TRIES


async def test_duplicates_are_taken_as_delivered(tmp_path: Path) -> None:
    """A receiver that has an event already may say 409."""
    async with receiving() as receiver, opened(tmp_path, **config_of(receiver)) as ledger:
        receiver.answer = lambda _: 409
        await write(ledger, "req-1")
        await delivered(receiver, ledger, 1)
        assert len(receiver.attempts) == 1


async def test_huge_answer(tmp_path: Path) -> None:
    """A huge answer is not read, and the event counts as delivered."""
    async with receiving() as receiver, opened(tmp_path, **config_of(receiver)) as ledger:
        receiver.answer, receiver.body = lambda _: 200, b"x" * (64 << 20)
        await write(ledger, "req-1")
        await delivered(receiver, ledger, 1)


async def test_silent_receiver_delays_nothing(tmp_path: Path) -> None:
    """While a receiver refuses connections, records are written and loaded, and the ledger closes without delay."""
    dead = {"webhook": WebhookConfig("http://127.0.0.1:9/events")}
    async with opened(tmp_path, **dead) as ledger:
        await write(ledger, "req-1")
        assert ledger.webhook is not None
        waiting = Receiver()
        await waiting.wait(lambda: ledger.webhook is not None and ledger.webhook.trouble is not None)
        assert ledger.trouble is None
    async with receiving() as receiver, opened(tmp_path, **config_of(receiver)):
        await receiver.wait(lambda: receiver.ids == ["req-1"])


async def test_place_that_the_ledger_has_lost(tmp_path: Path) -> None:
    """Where a power failure has taken the end of the ledger but not the place, what follows is delivered."""
    data_dir, before = tmp_path / "data", tmp_path / "before"
    async with receiving() as receiver:
        async with opened(data_dir, **config_of(receiver)) as ledger:
            await write(ledger, "first")
            await delivered(receiver, ledger, 1)
        shutil.copytree(data_dir, before)
        async with opened(data_dir, **config_of(receiver)) as ledger:
            await write(ledger, "lost")
            await delivered(receiver, ledger, 1)
        shutil.copy(data_dir / FOLDER / "webhook.json", before / FOLDER / "webhook.json")
        for segment in (data_dir / FOLDER).glob("*.wal"):  # they are allocated, and were not written
            with (before / FOLDER / segment.name).open("ab"):
                pass
        for number, name in enumerate(("second", "third"), 1):
            async with opened(before, **config_of(receiver)) as ledger:
                await write(ledger, name)
                await delivered(receiver, ledger, 1)
            assert receiver.ids[2:] == ["second", "third"][:number]


async def test_unreadable_place(tmp_path: Path) -> None:
    """A damaged place is an error at start that says what happens without it."""
    async with opened(tmp_path):
        pass
    (tmp_path / FOLDER / "webhook.json").write_text("{")
    with pytest.raises(LedgerError, match=r"webhook\.json.*events begin with this start"):
        async with opened(tmp_path, webhook=WebhookConfig("http://127.0.0.1:9/events")):
            pass
