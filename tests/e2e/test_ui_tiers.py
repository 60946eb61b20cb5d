"""The live and the usage page of a server with lower tiers: their blocks, and the tokens that came from each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quipu.actors.messages.counts import Known
from tests.actors.ledger.ledgers import record_of
from tests.browsers import DESKTOP, PHONE, Browser
from tests.e2e.servers import Server, serving
from tests.web.api.admin.usage_books import copy_database, make_database

TIERS = {"device": 400, "host": 320, "disk": 160, "remote": 80, "unattributed": 0}
TIERS_SHOWN = ("host", "disk", "remote")
SAMPLES = """
quipu:kv_tier_blocks{model_name="m",state="used",tier="disk"} 700.0
quipu:kv_tier_blocks{model_name="m",state="free",tier="disk"} 300.0
quipu:kv_tier_loaded_blocks_total{model_name="m",tier="disk"} 41.0
quipu:kv_tier_failed_load_blocks_total{model_name="m",reason="corrupt",tier="disk"} 2.0
quipu:kv_tier_failed_load_blocks_total{model_name="m",reason="late",tier="disk"} 1.0
quipu:kv_tier_blocks{model_name="m",state="used",tier="remote"} 9000.0
quipu:kv_tier_blocks{model_name="m",state="free",tier="remote"} 0.0
quipu:cached_tokens_total{model_name="m",tier="disk"} 656.0
quipu:cached_tokens_total{model_name="m",tier="remote"} 96.0
"""
"""What engines with more tiers than this server's would add to its metrics."""
ADD_SAMPLES = f"""
const real = fetch;
fetch = async (url, options) => {{
  const answer = await real(url, options);
  return String(url).endsWith("metrics") ? new Response(await answer.text() + {json.dumps(SAMPLES)}) : answer;
}};
"""


@pytest.fixture(scope="module")
def served(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve with a host tier, after two requests, one of which came from all tiers."""
    folder: Path = tmp_path_factory.mktemp("tiers")
    make_database(folder / "template")
    (folder / "served").mkdir()
    records = [
        record_of(name, closed_at=time.time() - 60, prompt=Known(1000), cached=Known(cached), cached_by_tier=tiers)
        for name, cached, tiers in (("r1", 960, TIERS), ("r2", 64, {"device": 64}))
    ]
    copy_database(folder / "template", folder / "served" / "data", records)
    with serving(folder / "served", "--executor", "fake", "--kv-host-memory", "64KiB") as server:
        yield server


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["390", "1280"])
def test_live_page(served: Server, browser: Browser, size: tuple[int, int]) -> None:
    """The live page has each tier that the engines have, with its blocks and loads, and the cached tokens of each."""
    browser.look(size=size, scheme="dark")
    added = browser.command("Page.addScriptToEvaluateOnNewDocument", {"source": ADD_SAMPLES})
    try:
        browser.open(served.url, "live")
        browser.wait_text("[data-tier=disk]", "41 blocks loaded, 3 that could not be")
        labels = {tier: f"[aria-label='Blocks of the {tier} tier by state'] + p" for tier in TIERS_SHOWN}
        blocks = {tier: browser.find(label).text for tier, label in labels.items()}
        assert blocks["disk"].split("\n") == ["cached 700", "free 300"]
        assert blocks["remote"].split("\n") == ["cached 9,000", "free 0"]
        assert blocks["host"].split("\n")[0] == "cached 0", "this server's own"
        hits = browser.find("[aria-label='Prompt tokens from cache by tier'] + p").text
        assert hits.split("\n") == ["on the device 0", "from disk 656", "from remote 96"]
    finally:
        browser.command("Page.removeScriptToEvaluateOnNewDocument", added)


def test_usage_page(served: Server, browser: Browser) -> None:
    """The usage page has columns and bars for the tiers that tokens came from."""
    browser.open(served.url, "usage")
    browser.wait_text("[data-figure=Requests] .big", "2")
    table = "document.querySelector('[aria-label=\"By group\"] table')"
    heads = browser.run(f"return [...{table}.tHead.rows[0].cells].map((cell) => cell.textContent)")
    cells = browser.run(f"return [...{table}.tBodies[0].rows[0].cells].map((cell) => cell.textContent)")
    row = dict(zip(heads, cells, strict=True))
    assert [row[name] for name in ("Cached", "From host", "From disk", "From remote")] == ["1,024", "320", "160", "80"]
    parts = (
        "['reused', 'host', 'disk', 'remote', 'computed'].map((kind) => document.querySelector(`.bars .is-${kind}`))"
    )
    heights = [float(height) for height in browser.run(f"return {parts}.map((bar) => bar.getAttribute('height'))")]
    assert [round(height / heights[3]) for height in heights] == [6, 4, 2, 1, 12]
