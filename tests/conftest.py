"""Settings of the whole suite: hypothesis profiles, no network, and log configuration restored after each test."""

from __future__ import annotations

import gc
import os
import signal
import ssl
from collections.abc import Generator, Iterator
from functools import cache
from typing import Any

import httpcore2
import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.remote import Producer  # type: ignore[import-untyped]  # it has no types
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # it has no types

from tests.covering import mark_what_is_covered
from tests.e2e.shared_servers import TOGETHER
from tests.lazy_builders import lazy_builders
from tests.postgres import postgres, postgres_cluster, pytest_terminal_summary
from tests.tiny import EXECUTOR

__all__ = ["postgres", "postgres_cluster", "pytest_terminal_summary"]

if EXECUTOR == "vllm":
    from tests.vllm_runner import v2_stand_ins
    from tests.vllm_runner.elsewhere import LEFT_OUT
    from tests.vllm_runner.fake_over_vllm import load_vllm_first, sound_passes

    __all__ += ["sound_passes"]
    if v2_stand_ins.INTERPRETED:
        v2_stand_ins.install()

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault(
    "GOMP_SPINCOUNT", "0"
)  # before torch loads: workers have fewer cores than threads that would spin

settings.register_profile(
    "ci", max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", max_examples=2000, stateful_step_count=120, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Replace ignored signals by handlers that do nothing: children inherit the former, under `nohup` for example."""
    config.addinivalue_line("markers", "covering: `make test` runs as many cases as show each pair of values")
    if EXECUTOR == "vllm" and not config.getoption("numprocesses", None):
        load_vllm_first()
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose among the cases of tests that need not have all; leave out what cannot run on vLLM, if that is tested."""
    mark_what_is_covered(items)
    if EXECUTOR == "vllm":
        left_out = [item for item in items if {item.name, getattr(item, "originalname", None)} & LEFT_OUT.keys()]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_xdist_auto_num_workers() -> int:
    """Start one worker more than there are cores: the suite waits for timers and processes a quarter of its time."""
    return len(os.sched_getaffinity(0)) + 1


class TogetherScheduling(LoadFileScheduling):
    """Hands out whole files, as `--dist loadfile` does; files that share a server or a browser go to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return TOGETHER.get(path, path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> TogetherScheduling | None:
    return TogetherScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without the collector: what they make stays, and it would look through it over and over."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """The collector need not look through torch and all else that tests import: that took half a second each time.

    Not even now: to find the cycles of 170,000 objects among them takes more than a second. It runs less often, too:
    tests make many short-lived cycles, and looking for them took a tenth of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def frozen_imports() -> Iterator[None]:
    """Keep frozen what `pytest_collection_finish` froze: commands of `quipu bench` would unfreeze it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_tls_context() -> Iterator[None]:
    """Load the certificates only once: it takes 20 ms per HTTP client, and no test uses TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        patch.setattr(httpcore2, "default_ssl_context", cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(autouse=True, scope="session")
def unused_url_builders() -> Iterator[None]:
    """Leave out most of the 4 ms that an application takes."""
    with lazy_builders():
        yield


@pytest.fixture(autouse=True)
def restore_log_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo a test's structlog configuration: a logger that cached it would write to closed streams."""
    configure = structlog.configure

    def configure_uncached(**settings: Any) -> None:
        configure(**{**settings, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", configure_uncached)
    yield
    structlog.reset_defaults()
