"""The pictures of the pages in the README and in docs/use/ui.md: `python -m tests.e2e.ui_pictures` takes them anew.

The test of the pictures takes them, too, and checks their size. They show the demo model, after a day of made-up usage.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from quipu.actors.messages.counts import Known
from quipu.actors.messages.usage_record import UsageRecord
from tests.actors.ledger.ledgers import record_of
from tests.browsers import DESKTOP, PHONE, Browser, Keys, missing_programs, open_browser
from tests.e2e.servers import Server, serving
from tests.web.api.admin.usage_books import copy_database, make_database

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
MAX_BYTES = 200 * 1024
HOUR = 3600
PRICES = """
[[prices]]
model = "demo"
currency = "EUR"
input = 0.50
cached_input = 0.05
output = 1.50
"""
FACTS = ("Otto keeps an owl.", "The river passed the old mill.", "Mira lives in Ashford.", "The bakery opens at six.")
SYSTEM = "Answer questions about this text.\n\n" + " ".join(FACTS * 6)
NAMES = ("playground", "playground-phone", "usage", "live", "cache", "cache-phone")
HURRY = "const real = window.setTimeout; window.setTimeout = (call, ms) => real(call, ms / 10)"
"""Polls ten times as often, so that the graphs fill."""


def past_records(now: float) -> Iterator[UsageRecord]:
    """Yield a day of requests of two tenants: more by day than by night, with more from cache as time goes on."""
    draw = random.Random(5)
    for hour in range(1, 24):
        for number in range(3 + (hour * 5) % 17):
            prompt = draw.randrange(800, 4000)
            cached = int(prompt * draw.uniform(0.2, 0.4 + hour / 45)) // 16 * 16
            yield record_of(
                f"req-{hour}-{number}",
                tenant=draw.choice(("acme", "acme", "bolt")),
                closed_at=now - hour * HOUR - draw.uniform(0, 600),
                prompt=Known(prompt),
                cached=Known(cached),
                cached_by_tier={"device": cached, "host": 0, "disk": 0, "remote": 0, "unattributed": 0},
                cache_write=Known((prompt - cached) // 16 * 16),
                completion_tokens=draw.randrange(100, 700),
            )


@contextmanager
def demo_with_history(folder: Path) -> Iterator[Server]:
    """Serve the demo model, with prices, and with a day of usage in its ledger."""
    (folder / "prices.toml").write_text(PRICES)
    make_database(folder / "template")
    (folder / "served").mkdir()
    copy_database(folder / "template", folder / "served" / "data", past_records(time.time()))
    with serving(folder / "served", "demo", "--prices", str(folder / "prices.toml")) as server:
        yield server


def ask(browser: Browser, question: str) -> None:
    """Ask in the playground, and wait for the whole answer."""
    before = len(browser.all(".promptbar"))
    browser.paste("#draft", question, Keys.ENTER)
    browser.until(lambda: len(browser.all(".promptbar")) == before + 1, "the answer is complete")


def take_playground(browser: Browser, server: Server, path: Path) -> None:
    browser.open(server.url)
    browser.find("details.settings summary")
    if not browser.all("details.settings[open]"):
        browser.find("details.settings summary").click()
    browser.paste(".settings textarea", SYSTEM)
    if browser.run("return window.innerWidth") < DESKTOP[0]:
        browser.find("details.settings summary").click()
    ask(browser, "Where does Mira live?")
    ask(browser, "What does Otto keep?")
    browser.find("article:last-of-type button[aria-expanded]").click()
    browser.find(".why")
    browser.run("document.activeElement.blur(); window.scrollTo(0, document.body.scrollHeight)")
    browser.picture(path)


def take_live(browser: Browser, server: Server, path: Path) -> None:
    hurry = browser.command("Page.addScriptToEvaluateOnNewDocument", {"source": HURRY})
    try:
        browser.open(server.url, "live")
        browser.find("[data-graph=running]")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: tell(server, number), range(24)))
        browser.until(lambda: browser.find("[data-graph=gap] .big").text.endswith("ms"), "the graphs have values")
        browser.picture(path)
    finally:
        browser.command("Page.removeScriptToEvaluateOnNewDocument", hurry)


def tell(server: Server, number: int) -> None:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Tell me a story about Mira and Otto. {number % 5}"},
    ]
    body = {"model": "demo", "messages": messages, "max_tokens": 40 + number * 3, "ignore_eos": True}
    server.post("/v1/chat/completions", body).raise_for_status()


def converse(server: Server) -> str:
    """Have conversations that part at many places, one of them with a pinned beginning; return a request's id."""
    draw = random.Random(11)
    request_id = ""
    for topic, num_conversations in (("Mira", 7), ("Otto", 5), ("the mill", 3)):
        system = {"role": "system", "content": f"Tell stories about {topic}. {' '.join(draw.choices(FACTS, k=9))}"}
        for number in range(num_conversations):
            messages = [system]
            for turn in range(1 + number % 4):
                messages.append({"role": "user", "content": f"{number}. {' '.join(draw.choices(FACTS, k=3 + turn))}"})
                request_id = chat(server, messages)
                if draw.random() < 0.4:
                    chat(server, [*messages[:-1], {"role": "user", "content": f"Or: {draw.choice(FACTS) * 2}"}])
                messages.append({"role": "assistant", "content": " ".join(draw.choices(FACTS, k=2))})
    pinned = {"type": "text", "text": " ".join(FACTS * 5), "cache_control": {"type": "ephemeral"}}
    body = {"model": "demo", "max_tokens": 2, "system": [pinned], "messages": [{"role": "user", "content": "A cord."}]}
    server.post("/v1/messages", body).raise_for_status()
    return request_id


def chat(server: Server, messages: list[dict[str, str]]) -> str:
    answer = server.post("/v1/chat/completions", {"model": "demo", "messages": messages, "max_tokens": 2})
    answer.raise_for_status()
    return answer.headers["x-quipu-request-id"]


def take_cache(browser: Browser, server: Server, request_id: str, path: Path) -> None:
    browser.open(server.url, "cache")
    browser.find("[role=treeitem]")
    browser.find("input[name=request]").send_keys(request_id, Keys.ENTER)
    browser.find(".path-card ~ .details")
    browser.wait_text(".path-card", "came from cache")
    browser.find(".is-on-path .knot").click()
    browser.wait_text(".about", "branches go on")
    browser.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    browser.picture(path)


def take_usage(browser: Browser, server: Server, path: Path) -> None:
    browser.open(server.url, "usage")
    browser.wait_text("[data-figure=Requests]", "")
    browser.find("fieldset label:last-of-type input").click()
    browser.wait_text("h2", "By model, tenant")
    browser.run("document.activeElement.blur()")
    browser.picture(path)


def take_all(browser: Browser, server: Server, folder: Path) -> list[Path]:
    """Take every picture into `folder` and return their paths."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{name}.webp" for name in NAMES]
    browser.look(size=DESKTOP, scheme="light")
    take_playground(browser, server, paths[0])
    browser.look(size=PHONE, scheme="dark")
    take_playground(browser, server, paths[1])
    browser.look(size=DESKTOP, scheme="light")
    take_usage(browser, server, paths[2])
    browser.look(size=DESKTOP, scheme="dark")
    take_live(browser, server, paths[3])
    request_id = converse(server)
    browser.look(size=DESKTOP, scheme="light")
    take_cache(browser, server, request_id, paths[4])
    browser.look(size=PHONE, scheme="dark")
    take_cache(browser, server, request_id, paths[5])
    return paths


def main() -> int:
    if missing := missing_programs():
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory() as folder,
        demo_with_history(Path(folder)) as server,
        open_browser() as browser,
    ):
        for path in take_all(browser, server, FOLDER):
            print(path.name, path.stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
