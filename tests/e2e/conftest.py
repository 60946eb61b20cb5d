"""What the tests of this folder share: servers, and a browser. Tests that kill a process have servers of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import openai
import pytest

from tests.browsers import Browser, browser, check_browser, open_browser
from tests.e2e.servers import Server, serving
from tests.e2e.shared_servers import BROWSERS, SERVERS, TOGETHER
from tests.kept_in_folder import KeptInFolder

__all__ = ["browser"]

TIGHT_BLOCKS = 25
"""24 usable ones: a context of 384 tokens, far less than several requests need together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check that every file that uses what is shared is in the table of those that do."""
    shared = {*SERVERS, *BROWSERS}
    functions = [item for item in items if isinstance(item, pytest.Function)]
    using = {item.nodeid.partition("::")[0] for item in functions if not shared.isdisjoint(item.fixturenames)}
    if missing := using - TOGETHER.keys():
        raise pytest.UsageError(f"not in tests/e2e/shared_servers.py: {sorted(missing)}")


def _kept(name: str, *flags: str) -> KeptInFolder[[pytest.TempPathFactory], Server]:
    """Return a server that starts with the first test that needs it, and ends with the folder."""

    def start(factory: pytest.TempPathFactory) -> AbstractContextManager[Server]:
        return serving(factory.mktemp(name), *flags)

    return KeptInFolder(Path(__file__).parent, start)


_tiny = _kept("tiny", "--log-level", "debug", "--num-blocks", "1200")
_tight = _kept("tight", "--num-blocks", str(TIGHT_BLOCKS))
_fake = _kept("fake", "--executor", "fake", "--log-level", "debug")
_browser = KeptInFolder(Path(__file__).parent, open_browser)


def pytest_configure(config: pytest.Config) -> None:
    for each in (_tiny, _tight, _fake, _browser):
        config.pluginmanager.register(each)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """The tiny model with a large block pool, logging at debug level."""
    return _tiny.get(tmp_path_factory)


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """The tiny model with a block pool so small that requests are preempted."""
    return _tight.get(tmp_path_factory)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """The KV-reading fake executor, 5 ms per step."""
    return _fake.get(tmp_path_factory)


@pytest.fixture(scope="module")
def one_browser() -> Browser:
    """The one browser for all pages."""
    check_browser()
    return _browser.get()


@pytest.fixture
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    """The official client of the tiny model's server."""
    with tiny.client() as client:
        yield client


@pytest.fixture(autouse=True)
def _leave_shared_servers_at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test that no account is open, no block is held and no account is disputed."""
    yield
    for name in ("tiny", "tight", "fake"):
        if name in request.fixturenames:
            metrics = request.getfixturevalue(name).wait_at_rest()
            assert metrics["usage_disputed_total"] == 0
