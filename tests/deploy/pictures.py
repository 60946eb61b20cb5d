"""The pictures of docs/operate/alerts.md: `python -m tests.deploy.pictures` takes them anew, in two minutes.

A demo server with two engines gets requests, one engine is killed meanwhile, and a Prometheus with the rules of
`deploy/` watches. The dashboard is drawn from its answers to the panels' queries (`panel_drawing.py`: there is no
Grafana here), the alerts are its own page in a browser.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.browsers import DESKTOP, missing_programs, open_browser
from tests.deploy.dashboard import PICTURE, for_prometheus, pictured_panels
from tests.deploy.panel_drawing import Series, draw_dashboard, named
from tests.deploy.watching import Prometheus, watched
from tests.e2e.servers import Server
from tests.e2e.ui_pictures import FACTS, SYSTEM
from tests.processes import eventually

ALERTS = PICTURE.with_name("alerts.webp")
SECONDS = 75.0
KILLED_AFTER_S = 45.0
NUM_CLIENTS = 3
RATE_INTERVAL = "15s"


def series_of(prometheus: Prometheus, panel: Mapping[str, Any], start: float, end: float) -> Sequence[Series]:
    """Return what a Prometheus has for a panel."""
    return [
        Series(named(target.get("legendFormat", ""), one["metric"]), points)
        for target in panel["targets"]
        for one in prometheus.query_range(_expression(target["expr"]), start=start, end=end)
        if (points := tuple((float(at), float(value)) for at, value in one["values"] if value != "NaN"))
    ]


def _expression(text: str) -> str:
    return for_prometheus(text.replace("$__rate_interval", RATE_INTERVAL))


def load(server: Server, until: float) -> None:
    """Have clients ask until then; one engine is killed meanwhile."""

    def ask(client: int) -> None:
        draw = random.Random(client)
        while time.monotonic() < until:
            facts = " ".join(draw.choices(FACTS, k=draw.randrange(1, 6)))
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{facts} What do they do?"}]
            body = {"model": "demo", "messages": messages, "max_tokens": draw.randrange(20, 120), "ignore_eos": True}
            server.post("/v1/chat/completions", body if draw.random() > 0.03 else {**body, "n": 0})
            time.sleep(draw.expovariate(2.0))

    def kill() -> None:
        time.sleep(KILLED_AFTER_S)
        os.kill(server.engines()[0], signal.SIGKILL)

    with ThreadPoolExecutor(NUM_CLIENTS + 1) as threads:
        for done in [threads.submit(kill), *(threads.submit(ask, client) for client in range(NUM_CLIENTS))]:
            done.result()


def is_firing(prometheus: Prometheus) -> bool:
    return any(rule.get("state") == "firing" and rule["name"] == "QuipuEngineDied" for rule in prometheus.rules())


def take(folder: Path) -> Iterator[Path]:
    """Take both pictures; yield the path of each."""
    with watched(folder, "demo", "--engines", "2", "--num-blocks", "400") as (server, prometheus):
        start = time.time() + float(RATE_INTERVAL[:-1])
        load(server, time.monotonic() + SECONDS)
        end = time.time()
        drawn = draw_dashboard(pictured_panels(), lambda panel: series_of(prometheus, panel, start, end))
        PICTURE.write_text(drawn, "utf-8")
        yield PICTURE
        eventually(lambda: is_firing(prometheus), "the engine's death is an alert")
        with open_browser() as browser:
            browser.look(size=DESKTOP, scheme="light")
            browser.driver.get(f"{prometheus.url}/classic/alerts")  # Debian's package has no other pages
            browser.until(lambda: "QuipuEngineDied" in browser.body(), "the page has the alerts")
            browser.run("""
                const [firing] = document.querySelectorAll(".alert-danger");
                firing.click(); firing.scrollIntoView({block: "center"})""")
            browser.picture(ALERTS)
        yield ALERTS


def main() -> int:
    if missing := missing_programs():
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        for path in take(Path(folder)):
            print(path.name, path.stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
