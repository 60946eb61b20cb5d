"""Step reports for tests: empty, but for the columns that a test sets."""

from __future__ import annotations

from typing import Any

import msgspec

from quipu.actors.messages.accountant import StepReport


def report(**columns: Any) -> StepReport:
    """Return a report with these columns, numbered 0."""
    required = msgspec.structs.fields(StepReport)
    values: dict[str, Any] = {field.name: 0 if field.type is int else [] for field in required if field.required}
    return StepReport(**{**values, **columns})
