"""Runs the fault tests on the fake executor with one token per row and step, and with up to four."""

from __future__ import annotations

import pytest

from tests.several_engines import engines, parametrize

__all__ = ["engines"]

ONE_TOKEN = {
    "test_killed_at_every_token": "runs the CPU's kernels, which yield one token a row",
    "test_every_fourth_pass_raises": "runs the CPU's kernels",
    "test_random_bodies": "draws bodies, most of which are refused before any step",
}
"""Tests for which the number of tokens makes no difference, and why."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, several_tokens=metafunc.function.__name__ not in ONE_TOKEN)
