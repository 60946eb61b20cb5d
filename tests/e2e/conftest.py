"""Servers shared by the tests of this folder. Tests that kill a process or need a fresh server do not use them."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.browsers import browser, one_browser
from tests.e2e.servers import Server, serving
from tests.e2e.shared_servers import BROWSERS, SERVERS, TOGETHER

__all__ = ["browser", "one_browser"]

TIGHT_BLOCKS = 25
"""24 usable ones: a context of 384 tokens, far less than several requests need together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check that every file that uses what is shared is in the table of those that do."""
    shared = {*SERVERS, *BROWSERS}
    functions = [item for item in items if isinstance(item, pytest.Function)]
    using = {item.nodeid.partition("::")[0] for item in functions if not shared.isdisjoint(item.fixturenames)}
    if missing := using - TOGETHER.keys():
        raise pytest.UsageError(f"not in tests/e2e/shared_servers.py: {sorted(missing)}")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny model with a large block pool, logging at debug level."""
    with serving(tmp_path_factory.mktemp("tiny"), "--log-level", "debug", "--num-blocks", "1200") as server:
        yield server


@pytest.fixture(scope="session")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny model with a block pool so small that requests are preempted."""
    with serving(tmp_path_factory.mktemp("tight"), "--num-blocks", str(TIGHT_BLOCKS)) as server:
        yield server


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The KV-reading fake executor, 5 ms per step."""
    with serving(tmp_path_factory.mktemp("fake"), "--executor", "fake", "--log-level", "debug") as server:
        yield server


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
