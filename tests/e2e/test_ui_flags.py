"""The flags of the pages on a whole server; no browser is needed."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.servers import run_quipu, serving
from tests.tiny import TINY

PRICE = '[[prices]]\nmodel = "demo"\ncurrency = "EUR"\ninput = {}\noutput = 1\n'


def test_no_ui(tmp_path: Path) -> None:
    """With `--no-ui` the paths of the pages are unknown URLs, and `/server_info` says so."""
    with serving(tmp_path / "without", "--executor", "fake", "--no-ui") as server:
        assert [server.get(path).status_code for path in ("/ui", "/ui/", "/ui/session", "/ui/usage")] == [404] * 4
        assert server.get("/server_info").json()["settings"]["serves_ui"] is False


def test_wrong_prices(tmp_path: Path) -> None:
    """A server with invalid prices does not start, and says what is wrong with them."""
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICE.format("-2"))
    done = run_quipu("serve", str(TINY), "--prices", str(prices), "--port", "0", folder=tmp_path)
    assert done.returncode == 2
    assert "prices[0]: `input` must be between 0 and" in done.stderr
