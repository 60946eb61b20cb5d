"""Kinds of requests and service tiers as filters and groups: the same rows from memory, SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from quipu.actors.ledger.database import make_engine, migrate, sqlite_url
from quipu.actors.ledger.queries import GroupColumn, Query, Sum, SumBuilder
from quipu.actors.ledger.reading import open_reader
from quipu.actors.messages.counts import Known
from quipu.actors.messages.usage_record import ServiceTier, UsageRecord
from quipu.kernels.step_types import SequenceKind
from tests.actors.ledger.ledgers import T0, record_of
from tests.actors.ledger.open_ledgers import insert_records
from tests.postgres import Postgres

STANDARD, BATCH = ServiceTier.STANDARD, ServiceTier.BATCH
START = T0 - T0 % 60
_FIELDS: dict[str, dict[str, Any]] = {
    "chat": {},
    "line": {"batch_id": "batch_1"},
    "vector": {"kind": SequenceKind.EMBED, "model": "small"},
    "vectors": {"kind": SequenceKind.EMBED, "model": "small", "batch_id": "batch_2", "closed_at": START + 60},
    "ranks": {"kind": SequenceKind.SCORE, "tenant": "bolt", "closed_at": START + 61},
    "again": {"batch_id": "batch_1", "retry_of": "line", "closed_at": START + 62},
}
RECORDS: list[UsageRecord] = [
    record_of(name, **{"closed_at": START + number, "prompt": Known(1 << number), **fields})
    for number, (name, fields) in enumerate(_FIELDS.items())
]
"""Each has a bit of its own as prompt tokens, so that a sum says which records are in it."""


@attrs.frozen
class Question:
    query: Query
    ids: str
    """Of the records that match, oldest first."""
    sums: dict[tuple[object, ...], str]
    """Whose tokens are added up, by bucket and group."""
    by: tuple[GroupColumn, ...] = ()
    bucket_s: int | None = None


EVERYTHING = "chat line vector vectors ranks again"
QUESTIONS = (
    Question(Query(kinds=("generate",)), "chat line again", {(None,): "chat line again"}),
    Question(Query(kinds=("embed", "score")), "vector vectors ranks", {(None,): "vector vectors ranks"}),
    Question(Query(kinds=("image",)), "", {}, by=("model",)),
    Question(Query(service_tiers=(BATCH,)), "line vectors again", {(None,): "line vectors again"}),
    Question(Query(service_tiers=(STANDARD,)), "chat vector ranks", {(None,): "chat vector ranks"}),
    Question(Query(service_tiers=(STANDARD, BATCH)), EVERYTHING, {(None,): EVERYTHING}),
    Question(Query(kinds=("embed",), service_tiers=(BATCH,), tenants=("acme",)), "vectors", {(None,): "vectors"}),
    Question(Query(service_tiers=(BATCH,), until=START + 60), "line", {(None, "batch"): "line"}, by=("service_tier",)),
    Question(
        Query(),
        EVERYTHING,
        {
            (None, "embed", "batch"): "vectors",
            (None, "embed", "standard"): "vector",
            (None, "generate", "batch"): "line again",
            (None, "generate", "standard"): "chat",
            (None, "score", "standard"): "ranks",
        },
        by=("kind", "service_tier"),
    ),
    Question(
        Query(service_tiers=(BATCH,)),
        "line vectors again",
        {
            (START, "batch", "demo"): "line",
            (START + 60, "batch", "demo"): "again",
            (START + 60, "batch", "small"): "vectors",
        },
        by=("service_tier", "model"),
        bucket_s=60,
    ),
)


def wanted_rows(question: Question) -> list[tuple[object, ...]]:
    prompts = {record.request_id: record.prompt_tokens or 0 for record in RECORDS}
    return [
        (*group, len(names.split()), sum(prompts[name] for name in names.split()))
        for group, names in question.sums.items()
    ]


def rows_of(sums: Sequence[Sum]) -> list[tuple[object, ...]]:
    return [(one.bucket, *one.group.values(), one.num_requests, one.prompt_tokens) for one in sums]


def test_in_memory() -> None:
    """Records that are not in a database yet match, and are added up, by their kind and tier."""
    for question in QUESTIONS:
        matching = [record for record in RECORDS if question.query.matches(record)]
        assert [record.request_id for record in matching] == question.ids.split(), question
        builder = SumBuilder(question.by, question.bucket_s)
        for record in matching:
            builder.add_record(record)
        assert rows_of(builder.sums()) == wanted_rows(question), question


def test_in_sqlite(tmp_path: Path) -> None:
    """SQLite answers each question like memory."""
    check(sqlite_url(tmp_path))


def test_in_postgres(postgres: Postgres) -> None:
    """PostgreSQL answers each question like memory."""
    check(postgres.new_database())


def check(url: str) -> None:
    engine = make_engine(url)
    migrate(engine)
    engine.dispose()
    insert_records(url, RECORDS)
    with open_reader(url=url) as reader:
        for question in QUESTIONS:
            found = [one.record.request_id for one in reader.records(question.query)]
            assert found == question.ids.split(), question
            sums = reader.sums(question.query, group_by=question.by, bucket_s=question.bucket_s)
            assert rows_of(sums) == wanted_rows(question), question
