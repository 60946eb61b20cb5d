"""Settings of the whole suite: how deep hypothesis digs, and no network."""

from __future__ import annotations

import os

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
