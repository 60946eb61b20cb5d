"""The time between the tokens of a sequence, as the accountant sees them arrive.

What must always hold: nothing is kept of a sequence that has no request; a step's tokens are observed with as few calls
as there are different times, since nearly all of them have waited for the same step.
"""

from __future__ import annotations

from ..messages.accountant import StepReport
from .entry_store import EntryStore
from .metrics import Metrics


def time_tokens(report: StepReport, now: float, store: EntryStore, metrics: Metrics) -> None:
    """Observe how long each token of a step came after its predecessor, and note when it came."""
    last, requests = store.last_token_at, store.by_sequence
    num_since: dict[float, int] = {}
    """Number of tokens by the time of their predecessor."""
    for sequence_id in report.token_sequence_ids:
        before = last.get(sequence_id)
        if before is not None:
            num_since[before] = num_since.get(before, 0) + 1
        elif sequence_id not in requests:
            continue
        last[sequence_id] = now
    for before, num_tokens in num_since.items():
        metrics.inter_token_latency.observe(now - before, num_tokens, engine_id=report.engine_id)
