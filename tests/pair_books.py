"""What must be true of counters and records once no account is open, for tests with a pair of engines."""

from __future__ import annotations

from collections.abc import Sequence

from quipu.actors.messages.counts import Known
from quipu.actors.messages.usage_record import UsageRecord
from tests.runtimes import Client


def check_books(client: Client, records: Sequence[UsageRecord]) -> None:
    """Check that nothing is disputed, and that the counters of each engine are sums over these records."""
    assert not any(record.disputed for record in records)
    check_counters(client, records)
    for record in records:
        check_coverage(record)


def check_counters(client: Client, records: Sequence[UsageRecord]) -> None:
    """Check that the counters of each engine are sums over these records, all that there were."""
    metrics, engines = client.runtime.metrics, [engine.engine_id for engine in client.runtime.desk.pool]
    assert client.runtime.entry_store.num_open_accounts == 0
    for engine in (None, *engines):
        own = [record for record in records if record.engine == engine]
        told = [record for record in own if isinstance(record.cached, Known)]
        assert metrics.usage_disputed.value(engine) == sum(record.disputed for record in own)
        assert metrics.prompt_tokens.value(engine) == sum(record.prompt_tokens or 0 for record in own)
        assert metrics.prefix_cache_hits.value(engine) == sum(record.cached_tokens or 0 for record in told)
        assert metrics.cached_tokens.value(engine, "unattributed") == 0
        assert metrics.generation_tokens.value(engine) == sum(record.completion_tokens for record in own)
        assert metrics.recomputed_tokens.value(engine) == sum(record.recomputed_tokens for record in own)
        if engine is not None:
            received = sum(record.moved_by_engine.get(engine, 0) for record in records)
            assert metrics.moved_tokens.value(engine) == received
    moved = sum(metrics.moved_tokens.value(engine) for engine in engines)
    assert moved == sum(record.moved_tokens for record in records)


def check_coverage(record: UsageRecord) -> None:
    """Check that each position of a finished request with one sequence per prompt was covered first once."""
    tiers = record.cached_by_tier or {}
    assert "peer" not in tiers
    assert sum(tiers.values()) == (record.cached_tokens or 0)
    if record.outcome == "finished" and record.num_choices == 1:
        covered = (record.cached_tokens or 0) + record.computed_tokens + record.restored_tokens
        assert covered == record.prompt_tokens
