"""Random queries for usage reports: each is answered, or refused with an error that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from bench.report_queries import ANTHROPIC, REPORTS, paths
from quipu.web.app import make_app
from tests.web.api.admin.usage_books import BookSource, record_at
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

RECORDS = [record_at(36 * number, f"req-{number:024x}", key_id=f"key-{number % 3}") for number in range(40)]


@pytest.mark.parametrize("report", list(REPORTS))
def test_random_reports(report: str, tmp_path: Path) -> None:
    """No query is a 5xx; a refusal has a message in the shape of its API."""
    client = Client(make_app(FakeDesk(), usage=BookSource(RECORDS, data_dir=tmp_path)))

    @given(st.lists(paths(report), min_size=5, max_size=5))
    def ask(drawn: list[str]) -> None:
        for path in drawn:
            trio.run(check, client, report, path)

    ask()


async def check(client: Client, report: str, path: str) -> None:
    async with client.open("GET", path) as exchange:
        status, body = await exchange.wait_started(), await exchange.read()
    assert status in (200, 400, 404), (path, body)
    if status != 200:
        answer = json.loads(body)
        assert answer["error"]["message"]
        assert answer["type"] == "error" if report == ANTHROPIC else {"type", "param", "code"} <= set(answer["error"])
