"""What an engine of the Python API still holds, read from its metrics."""

from __future__ import annotations

from quipu.actors.ledger.reconciling import parse_metrics

_HELD = ("open_accounts", "num_requests_running", "num_requests_waiting")


def held_in(metrics: str) -> float:
    """Return the open accounts and the running and waiting requests, all together."""
    values = parse_metrics(metrics)
    return sum(value for name, value in values.items() if name.partition("{")[0] in _HELD)
