"""The pages of a server with an adapter: loaded and asked on the live page, beside its model on the usage page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.engine.adapter_folders import make_folder
from tests.browsers import DESKTOP, PHONE, Browser
from tests.e2e.servers import Server, serving

SIZES = pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["390", "1280"])


@pytest.fixture(scope="module")
def served(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model and an adapter, after one request for the model and two for the adapter."""
    folder: Path = tmp_path_factory.mktemp("adapters")
    adapter = make_folder(folder / "pirate")
    with serving(folder / "served", "--executor", "fake", "--lora-modules", f"pirate={adapter}") as server:
        for model in ("demo", "pirate", "pirate"):
            server.complete([7] * 40, model=model).raise_for_status()
        yield server


def cells(browser: Browser, label: str) -> list[list[str]]:
    """Return the texts of a table's rows."""
    rows = f"[...document.querySelectorAll('[aria-label=\"{label}\"] tbody tr')]"
    found: list[list[str]] = browser.run(f"return {rows}.map((row) => [...row.cells].map((cell) => cell.innerText))")
    return found


@SIZES
def test_live_page(served: Server, browser: Browser, size: tuple[int, int]) -> None:
    """The live page lists each adapter with its model, digest and requests, and fits the screen."""
    browser.look(size=size, scheme="dark")
    browser.open(served.url, "live")
    browser.wait_text("h2", "Adapters")
    ((name, model, digest, requests),) = cells(browser, "Adapters")
    assert (name, model, requests) == ("pirate", "demo", "2")
    whole = browser.find("[aria-label=Adapters] code").get_attribute("title")
    assert len(digest) == 12 and whole is not None and whole.startswith(digest)
    assert browser.run("return document.documentElement.scrollWidth") == size[0]


@SIZES
def test_usage_page(served: Server, browser: Browser, size: tuple[int, int]) -> None:
    """The usage page has a row for each name, and the model beside that of its adapter."""
    browser.look(size=size, scheme="light")
    browser.open(served.url, "usage")
    browser.wait_text("[data-figure=Requests] .big", "3")
    rows = [row[:2] for row in cells(browser, "By group")]
    assert rows == [["demo", "1"], ["pirate adapter of demo", "2"]]
    assert browser.run("return document.documentElement.scrollWidth") == size[0]
