"""What `quipu top` shows: on terminals of any size, in lines, and as JSON."""

from __future__ import annotations

import io

import attrs
import orjson
import pytest
from rich.console import Console

from quipu.web.cli.top.figures import Reading, make_figures
from quipu.web.cli.top.metric_samples import parse_samples
from quipu.web.cli.top.screen import make_screen
from quipu.web.cli.top.view import Outage, View, document_of, line_of, rows_of

HOSTILE = "acme\x1b[2J\x07[bold]x[/bold]" + "\u202e" + "y" * 300


def reading(at_s: float, prompt: int, hits: int, tokens: int) -> Reading:
    """Return a reading of a server with a host tier, two engines and two tenants."""
    text = f"""\
quipu:ledger_info{{server="a"}} 1.0
quipu:num_requests_running{{engine="0"}} 2.0
quipu:num_requests_running{{engine="1"}} 1.0
quipu:prompt_tokens_total {prompt}
quipu:prefix_cache_queries_total {prompt}
quipu:prefix_cache_hits_total {hits}
quipu:cached_tokens_total{{tier="device"}} {hits - 10}
quipu:cached_tokens_total{{tier="host"}} 10.0
quipu:time_to_first_token_seconds_count 2.0
quipu:inter_token_latency_seconds_count {tokens}
quipu:inter_token_latency_seconds_sum {tokens / 100}
quipu:kv_blocks{{state="used"}} 20.0
quipu:kv_blocks{{state="pinned"}} 5.0
quipu:kv_blocks{{state="cached"}} 50.0
quipu:kv_blocks{{state="free"}} 25.0
quipu:kv_tier_blocks{{state="used",tier="host"}} 40.0
quipu:kv_tier_blocks{{state="free",tier="host"}} 60.0
quipu:engines_ready 1.0
quipu:engines_desired 2.0
"""
    engines = ({"id": 0, "role": "mixed", "state": "ready", "blocks_used": 20}, {"id": 1, "state": HOSTILE})
    row = {"tenant": HOSTILE, "model": "m", "requests": 3, "prompt_tokens": 400, "cached_tokens": 100, "series": [1]}
    return Reading(
        at_s,
        "ready",
        samples=parse_samples(text),
        engines=engines,
        upstreams=({"url": "http://x", "state": "down", "num_running": "many"},),
        tenants=({"tenant": None, "prompt_tokens": float("nan")}, row),
        tenants_window_s=3600,
    )


def view_of(before: Reading | None, now: Reading) -> View:
    return View("http://test", "12:00:00", 2.0, reading=now, figures=make_figures(before, now))


FIRST, SECOND = reading(0, 1000, 510, 100), reading(2, 1200, 660, 300)
VIEW = view_of(FIRST, SECOND)


def drawn(view: View, width: int = 120, height: int = 40) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="standard", width=width, height=height)
    console.print(make_screen(view, height))
    return screen.getvalue()


def test_rows() -> None:
    """Rates are of the period, hit rates are shown with the counts that they are made of."""
    rows = dict(rows_of(VIEW))
    assert rows["tokens"] == "prompt 100/s   computed 25.0/s   generated 100/s"
    assert rows["cached"] == "now 75.0% (150 of 200)   since the start 55.0% (660 of 1,200)"
    assert rows["from tiers"] == "device 650   host 10"
    assert rows["KV blocks"] == "25.0% in use   used 20   pinned 5   cached 50   free 25"
    assert rows["host tier"] == "used 40   free 60" and rows["engines"] == "1 of 2 ready"
    assert "between tokens 10 ms" in rows["latency"] and rows["requests"].startswith("running 3 ")
    assert dict(rows_of(view_of(None, FIRST)))["tokens"] == "prompt -/s   computed -/s   generated -/s"


def test_screen() -> None:
    """It has the numbers, engines, upstreams, and tenants by their tokens with their hit rates."""
    screen = drawn(VIEW)
    for text in ("http://test", "ready", "now 75.0% (150 of 200)", "blocks used", "http://x", "25.0%", "60 min"):
        assert text in screen, text


@pytest.mark.parametrize(("width", "height"), [(200, 60), (80, 24), (40, 10), (20, 5), (5, 2), (1, 1)])
def test_sizes(width: int, height: int) -> None:
    """Every size of a terminal is drawn on, and no line is wider than it."""
    for view in (VIEW, view_of(None, FIRST), attrs.evolve(VIEW, outage=Outage("11:59:58", "gone"))):
        screen = io.StringIO()
        Console(file=screen, width=width, height=height).print(make_screen(view, height))
        assert all(len(line) <= width for line in screen.getvalue().splitlines())


def test_words_of_a_server() -> None:
    """No name is obeyed by the terminal, or taken for markup."""
    screen = drawn(VIEW, width=400)
    assert "\x1b[2J" not in screen and "\x07" not in screen and "\u202e" not in screen and "[bold]x[/bold]" in screen


def test_lines() -> None:
    """A line has what matters; the first one, without rates, has the hit rate since the start."""
    words = "running 3  waiting 0  prompt 100/s  generated 100/s  cached 75.0% (150 of 200)  KV 25.0%  engines 1/2"
    assert line_of(VIEW) == f"12:00:00  {words}"
    assert "cached 51.0% (510 of 1,000) since the start" in line_of(view_of(None, FIRST))
    restarted = attrs.evolve(SECOND, samples=parse_samples('quipu:ledger_info{server="b"} 1.0\n'))
    assert line_of(view_of(FIRST, restarted)).endswith("the server has restarted")


def test_outages() -> None:
    """An outage says since when and why; the numbers before it stay on the screen."""
    view = attrs.evolve(VIEW, outage=Outage("11:59:58", "connection refused"))
    assert line_of(view) == "12:00:00  not reachable since 11:59:58: connection refused"
    assert "not reachable since 11:59:58" in drawn(view) and "150 of 200" in drawn(view)
    document = document_of(view)
    assert (document["reachable"], document["error"]) == (False, "connection refused")


def test_server_that_shows_no_numbers() -> None:
    """To a tenant's key there are the state, its own cache, and why there is no more."""
    view = view_of(None, attrs.evolve(SECOND, samples=None, engines=None, refusals=("needs an admin key",)))
    assert line_of(view) == "12:00:00  ready  needs an admin key"
    screen = drawn(view)
    assert "needs an admin key" in screen and "acme" in screen and "KV blocks" not in screen


def test_document() -> None:
    """As JSON there is everything, with the numbers that rates and shares are made of."""
    document = orjson.loads(orjson.dumps(document_of(VIEW)))
    assert document["numbers"]["lately"] == {"prompt_tokens": 200, "cached_tokens": 150}
    assert document["numbers"]["period_s"] == 2 and document["engines"][0]["state"] == "ready"
    assert document["tenants"][1]["cached_tokens"] == 100 and "series" not in document["tenants"][1]
