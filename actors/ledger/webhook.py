"""The usage webhook: a task that sends each record to a URL as a CloudEvent (`cloud_events.py`), off the request path.

A page of records is taken from the queue (`webhook_queue.py`) and sent by a few tasks, one record a request. The place
in the queue moves when all of a page was answered, or as far as it was when the server stops.

    2xx, 409                  delivered (409: the receiver has the event already)
    400, 413, 415, 422        tried REFUSED_TRIES times, then given up: logged and counted
    everything else           tried again, until it is delivered

What must always hold: an event is delivered at least once, or its loss is logged and counted; no request waits for a
receiver, whatever it does; of a receiver's answer little is read, in bounded time, and it is never followed elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import attrs
import structlog
import trio

from ..threads import run_in_thread
from .cloud_events import CONTENT_TYPE, cloud_event
from .database import reason
from .reading import LedgerRecord
from .webhook_queue import WebhookQueue

if TYPE_CHECKING:
    import httpx2

log = structlog.get_logger("quipu.ledger")

PAGE: Final = 64
NUM_SENDERS: Final = 8
POLL_S: Final = 1.0
"""How often the database is asked for new records while there are none."""
ANSWER_S: Final = 30.0
MAX_LENGTH_DIGITS: Final = 5
"""Of an answer's content-length: shorter bodies are read, so that the connection can be used again."""
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 60.0
REFUSED_TRIES: Final = 5
STOP_S: Final = 2.0
_REFUSED: Final = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    }
)


@attrs.frozen
class WebhookConfig:
    url: str
    key: str | None = attrs.field(default=None, repr=False)
    """Sent as a bearer token."""


class _Answer(Enum):
    DELIVERED = auto()
    REFUSED = auto()
    AWAY = auto()


class Webhook:
    def __init__(self, config: WebhookConfig, queue: WebhookQueue) -> None:
        self._config = config
        self._queue = queue
        self.num_delivered = 0
        self.num_given_up = 0
        self.trouble: str | None = None
        """Why nothing is being delivered, if so."""

    async def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        async with _client(self._config) as client:
            while True:
                try:
                    found = await run_in_thread(self._queue.take, PAGE, abandon_on_cancel=True)
                    if found:
                        await self._send_page(client, found)
                    else:
                        await trio.sleep(POLL_S)
                    pause_s = FIRST_PAUSE_S
                except Exception as error:  # of the database, the disk, or a row that somebody has changed
                    self._fail(reason(error))
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _send_page(self, client: httpx2.AsyncClient, found: list[LedgerRecord]) -> None:
        """Send all of a page, and move the place past what was answered."""
        waiting = iter(found)
        answered: set[int] = set()
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(min(NUM_SENDERS, len(found))):
                    nursery.start_soon(self._send_some, client, waiting, answered)
        finally:
            last = None
            for record in found:
                if record.number not in answered:
                    break
                last = record.number
            if last is not None:
                with trio.move_on_after(STOP_S, shield=True):
                    await run_in_thread(self._queue.advance, last, abandon_on_cancel=True)

    async def _send_some(self, client: httpx2.AsyncClient, waiting: Iterator[LedgerRecord], answered: set[int]) -> None:
        for found in waiting:
            await self._deliver(client, found)
            answered.add(found.number)

    async def _deliver(self, client: httpx2.AsyncClient, found: LedgerRecord) -> None:
        """Send one event until it is delivered, or refused too often."""
        event = cloud_event(found, self._queue.ledger)
        pause_s, num_refused = FIRST_PAUSE_S, 0
        while True:
            answer, why = await self._post(client, event)
            if answer is _Answer.DELIVERED:
                self.num_delivered += 1
                if self.trouble is not None:
                    log.info("usage_webhook.back")
                    self.trouble = None
                return
            if answer is _Answer.REFUSED:
                num_refused += 1
                if num_refused == REFUSED_TRIES:
                    self.num_given_up += 1
                    request_id = found.record.request_id
                    log.error(
                        "usage_webhook.given_up", request_id=request_id, why=why, help="the ledger has the record"
                    )
                    return
            else:
                self._fail(why)
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _post(self, client: httpx2.AsyncClient, event: bytes) -> tuple[_Answer, str]:
        """Send an event once. Whatever the library raises is the receiver's fault."""
        with trio.move_on_after(ANSWER_S):
            try:
                async with client.stream("POST", self._config.url, content=event) as response:
                    status = response.status_code
                    if _is_short(response):
                        async for _ in response.aiter_raw():
                            pass
            except Exception as error:
                return _Answer.AWAY, f"{type(error).__name__}: {error}"[:200]
            if 200 <= status < 300 or status == HTTPStatus.CONFLICT:
                return _Answer.DELIVERED, ""
            return (_Answer.REFUSED if status in _REFUSED else _Answer.AWAY), f"HTTP status {status}"
        return _Answer.AWAY, f"no answer within {ANSWER_S:g} s"

    def _fail(self, why: str) -> None:
        if self.trouble is None:
            log.warning("usage_webhook.away", why=why, help="events wait in the ledger until it is back")
        self.trouble = why


def _client(config: WebhookConfig) -> httpx2.AsyncClient:
    import httpx2  # only for servers that have a webhook

    headers = {"Content-Type": CONTENT_TYPE, "Accept-Encoding": "identity"}
    if config.key is not None:
        headers["Authorization"] = f"Bearer {config.key}"
    return httpx2.AsyncClient(headers=headers, timeout=None, follow_redirects=False)


def _is_short(response: httpx2.Response) -> bool:
    length = response.headers.get("content-length", "")
    return response.status_code == HTTPStatus.NO_CONTENT or (length.isdecimal() and len(length) <= MAX_LENGTH_DIGITS)
