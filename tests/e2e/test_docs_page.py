"""The page at `/docs` in a browser: every operation of the document, its fields, on a phone and a wide screen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browsers import DESKTOP, PHONE, Browser
from tests.e2e.servers import Server, serving

SIZES = pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["390", "1280"])


@pytest.fixture(scope="module")
def served(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("served"), "--executor", "fake") as server:
        yield server


@SIZES
def test_operations(served: Server, browser: Browser, size: tuple[int, int]) -> None:
    """The page lists every operation, opens one and shows fields within fields, and fits the screen."""
    paths = served.get("/openapi.json").json()["paths"]
    browser.look(size=size, scheme="dark")
    browser.driver.get(f"{served.url}/docs#post_v1_messages")
    browser.find("#post_v1_messages[open] .fields")
    assert len(browser.all(".operation")) == sum(map(len, paths.values()))
    browser.run("document.querySelector('#post_v1_messages .fields details').open = true")
    browser.wait_text("#post_v1_messages", '"assistant"')
    within = "#post_v1_messages .fields details details"
    browser.run("document.querySelectorAll(arguments[0]).forEach((one) => one.open = true)", within)
    browser.wait_text("#post_v1_messages", "tool_use_id")
    assert browser.run("return document.documentElement.scrollWidth") == size[0]


def test_filter(served: Server, browser: Browser) -> None:
    """What is typed leaves the operations whose path or summary contains it."""
    browser.driver.get(f"{served.url}/docs")
    browser.paste("input[type=search]", "cache/expl")
    browser.until(lambda: len(browser.all(".operation")) == 1, "one operation is left")
    browser.wait_text(".operation", "/v1/cache/explain/{request_id}")
