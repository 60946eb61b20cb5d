"""When a page of a server is on the screen, in a headless Chromium on this machine. Used by `bench.cache_tree`.

Times are the browser's own, from the beginning of the navigation with an empty cache: `page_ms` until something is
painted (first contentful paint), `content_ms` until what the page is there for is, which it marks itself.
"""

from __future__ import annotations

import statistics
from typing import Any

TIMES = """
const mark = performance.getEntriesByName(arguments[0])[0];
const paint = performance.getEntriesByName("first-contentful-paint")[0];
return mark && paint ? [paint.startTime, mark.startTime] : null;
"""


def first_paint(url: str, page: str, mark: str, rounds: int) -> dict[str, Any]:
    """Load a page so often; return the median and the longest times, or why there is none."""
    try:
        from tests.browsers import DESKTOP, missing_programs, open_browser  # needs what only tests need
    except ImportError as error:
        return {"not_measured": f"not installed: {error.name}"}
    if missing := missing_programs():
        return {
            "not_measured": f"not installed: {', '.join(missing)} (Debian: apt-get install chromium chromium-driver)"
        }
    times: list[tuple[float, float]] = []
    with open_browser() as browser:
        browser.look(size=DESKTOP, scheme="light")
        browser.command("Network.enable", {})
        browser.command("Network.setCacheDisabled", {"cacheDisabled": True})
        for _ in range(rounds):
            browser.open(url, page)
            times.append(browser.until(lambda: browser.run(TIMES, mark), f"the page marks {mark}"))
        num_drawn = len(browser.all("[role=treeitem]"))
    shown = {"loads": rounds, "drawn": num_drawn}
    for name, column in zip(("page_ms", "content_ms"), zip(*times, strict=True), strict=True):
        shown |= {name: round(statistics.median(column)), f"{name}_max": round(max(column))}
    return shown
