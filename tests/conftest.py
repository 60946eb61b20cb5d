"""Settings of the whole suite: how deep hypothesis digs, no network, and logs that no test leaves to the next."""

from __future__ import annotations

import gc
import os
import ssl
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.postgres import postgres, postgres_cluster, pytest_terminal_summary

__all__ = ["postgres", "postgres_cluster", "pytest_terminal_summary"]

os.environ["HF_HUB_OFFLINE"] = "1"

settings.register_profile(
    "ci", max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", max_examples=2000, stateful_step_count=120, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


def pytest_collection_finish() -> None:
    """The collector need not look through torch and all else that tests import: that took half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_tls_context() -> Iterator[None]:
    """Every HTTP client loads 150 certificates, 20 ms of work, for a TLS that no test speaks: once is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(autouse=True)
def logs_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test sets up for logs ends with it: a logger that remembered it would write to streams that are closed."""
    configure = structlog.configure

    def configure_for_now(**settings: Any) -> None:
        configure(**{**settings, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", configure_for_now)
    yield
    structlog.reset_defaults()
