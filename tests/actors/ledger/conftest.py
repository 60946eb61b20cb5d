"""Patience for the ledger's tests."""

from __future__ import annotations

import pytest

from quipu.actors.ledger import loader


@pytest.fixture(autouse=True)
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a ledger that closes load everything, however slow the machine: tests then look into its database."""
    monkeypatch.setattr(loader, "LAST_LOAD_S", 30.0)
