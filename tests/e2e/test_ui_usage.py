"""The usage page by month, custom range and tenant: its axis, time zone and names of keys, by keyboard alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from quipu.actors.messages.counts import Known
from quipu.kernels.step_types import SequenceKind
from quipu.web.auth.key_file import hash_key
from tests.actors.ledger.ledgers import record_of
from tests.browsers import PHONE, Browser, Keys
from tests.e2e.servers import Server, serving
from tests.web.api.admin.usage_books import copy_database, make_database

WIDE = (1440, 900)
SIZES = pytest.mark.parametrize("size", [PHONE, WIDE], ids=["390", "1440"])
KEYS = {"acme": "sk-quipu-of-acme", "ops": "sk-quipu-of-ops"}
WATCH = """
window.asked = [];
const real = fetch;
fetch = (url, options) => { asked.push(String(url)); return real(url, options); };
"""


def month_back(number: int) -> datetime:
    """Return the beginning of the month `number` months before this one."""
    now = datetime.now(UTC)
    months = now.year * 12 + now.month - 1 - number
    return datetime(months // 12, months % 12 + 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def served(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a tenant and an admin, with usage at the borders of the month before the last."""
    folder: Path = tmp_path_factory.mktemp("usage")
    entries: list[dict[str, Any]] = [
        {"id": f"id-{name}", "name": f"The {name} app", "tenant": name, "sha256": hash_key(key)}
        for name, key in KEYS.items()
    ]
    entries[-1]["admin"] = True
    (folder / "keys.json").write_text(json.dumps({"keys": entries}))
    begin, end = month_back(2).timestamp(), month_back(1).timestamp()
    generate, embed, score = SequenceKind
    books = [(begin - 1, "acme", 1000, generate), (begin, "acme", 200, generate), (begin + 86_400, "bolt", 40, score)]
    books += [(end - 1, "acme", 7, embed), (end, "bolt", 3000, embed), (time.time() - 60, "acme", 500, generate)]
    make_database(folder / "template")
    (folder / "served").mkdir()
    records = (
        record_of(
            f"req-{number}",
            tenant=tenant,
            key_id=f"id-{tenant}",
            closed_at=closed_at,
            prompt=Known(prompt),
            cached=Known(0),
            cached_by_tier=dict.fromkeys(("device", "host", "disk", "remote", "unattributed"), 0),
            cache_write=Known(0),
            kind=kind,
        )
        for number, (closed_at, tenant, prompt, kind) in enumerate(books)
    )
    copy_database(folder / "template", folder / "served" / "data", records)
    flags = ["--executor", "fake", "--key-file", str(folder / "keys.json")]
    with serving(folder / "served", *flags) as server:
        yield server


def prompt_tokens(browser: Browser, number: str) -> None:
    browser.wait_text("[data-figure='Prompt tokens'] .big", number)


def rows(browser: Browser) -> list[list[str]]:
    trs = "[...document.querySelectorAll('[aria-label=\"By group\"] tbody tr')]"
    cells = f"{trs}.map((row) => [...row.cells].map((cell) => cell.textContent))"
    found: list[list[str]] = browser.run(f"return {cells}")
    return found


@SIZES
def test_month_own_range_and_tenant(served: Server, browser: Browser, size: tuple[int, int]) -> None:
    """A month has the requests that ended in it, in UTC; a custom range includes both days; a tenant has its share."""
    browser.look(size=size, scheme="light")
    browser.open(served.url, "usage", key=KEYS["ops"])
    prompt_tokens(browser, "500")
    month = month_back(2)
    browser.tab_to("e.name === 'range'")
    browser.press(f"{month:%B %Y}")
    prompt_tokens(browser, "247")
    assert browser.run("return document.activeElement.name") == "range"
    browser.wait_text(".note", f"{month:%b} 1, {month.year} 00:00 to ")
    browser.wait_text(".note", "UTC")
    browser.wait_text("h2", "Tokens by time, in UTC")
    assert [one.text for one in browser.all(".axis.down span")] == ["500 tokens", "250", "0"]
    ticks = [one.text for one in browser.all(".axis.along span") if one.is_displayed()]
    assert ticks[0] == f"{month:%b} 1" and len(ticks) == (3 if size == PHONE else 5)
    browser.tab_to("e.name === 'tenant'")
    browser.press("acme", Keys.ENTER)
    prompt_tokens(browser, "207")
    browser.wait_text(".note", "Tenant acme.")
    browser.tab_to("e.name === 'by-api_key'")
    browser.press(Keys.SPACE)
    browser.wait_text("h2", "By model, key")
    assert [row[1] for row in rows(browser)] == ["The acme app id-acme"]
    browser.run("document.querySelector('[name=range]').focus()")
    browser.press("own")
    browser.find("input[name=first]")
    days = [browser.find(f"input[name={name}]").get_attribute("value") for name in ("first", "last")]
    assert days[0] == f"{month:%Y-%m}-01" and days[1] is not None and days[1].startswith(f"{month:%Y-%m}-")
    prompt_tokens(browser, "207")
    browser.tab_to("e.name === 'last'")
    browser.press(f"{month:%m}01{month.year}")
    prompt_tokens(browser, "200")
    width = "return document.documentElement.scrollWidth"
    assert browser.run(width) == size[0]
    browser.run(
        "const e = document.querySelector('[name=last]'); e.value = '1999-01-01'; e.dispatchEvent(new Event('change'))"
    )
    browser.wait_text("#rangeerror", "The last day is before the first.")
    assert not browser.all(".bars")


def test_kinds(served: Server, browser: Browser) -> None:
    """Texts, embeddings and scores are told apart by keyboard, in words, and the choice fits on a phone."""
    browser.look(size=PHONE, scheme="light")
    browser.open(served.url, "usage", key=KEYS["ops"])
    prompt_tokens(browser, "500")
    browser.tab_to("e.name === 'range'")
    browser.press(f"{month_back(2):%B %Y}")
    prompt_tokens(browser, "247")
    browser.tab_to("e.name === 'by-model'")
    browser.press(Keys.SPACE)
    browser.wait_text("h2", "All together")
    browser.press(Keys.TAB, Keys.SPACE)
    browser.wait_text("h2", "By kind")
    assert [row[:3] for row in rows(browser)] == [
        ["Embeddings", "1", "7"],
        ["Text", "1", "200"],
        ["Scores, reranking", "1", "40"],
    ]
    assert browser.run("return document.documentElement.scrollWidth") == PHONE[0]


def test_names_that_a_tenant_sees(served: Server, browser: Browser) -> None:
    """A tenant sees its keys by name and no field for others; its question cannot name another tenant."""
    browser.open(served.url, key=KEYS["acme"])
    browser.find("#draft")
    browser.run(WATCH)
    browser.run("location.hash = '#usage'")
    browser.tab_to("e.name === 'by-api_key'")
    browser.press(Keys.SPACE)
    browser.until(lambda: [row[:2] for row in rows(browser)][-1:] == [["demo", "The acme app id-acme"]], "the name")
    assert not browser.all("input[name=tenant]")
    asked = [parse_qs(urlsplit(url).query) for url in browser.run("return asked") if "/ui/usage" in url]
    assert asked and not any("tenant" in query for query in asked)
