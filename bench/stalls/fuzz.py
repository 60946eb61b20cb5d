"""Rows of random bodies made of each endpoint's own fields (`bench/bodies.py`), of questions about usage
(`bench/report_queries.py`), and of requests that an upstream answers with drawn bytes (`drawn_answers.py`)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from bench.bodies import ENDPOINTS, POOLED, bodies
from bench.report_queries import REPORTS, paths
from bench.stalls.attack import RawRequest
from bench.stalls.row_parts import CHAT, COMPLETIONS, Row, chat, got, made, posted, said
from bench.stalls.upstream import MODEL
from bench.stored_bodies import MADE_FIRST, STORED_BODIES, Made, StoredBody, filled

T = TypeVar("T")
CONCURRENCY = 16
DISCONNECT_AFTER_S = 10.0
"""A body that requests a whole context of tokens is not waited for."""
ROWS_AN_ENDPOINT = 500
"""Number of bodies in one row."""


def fuzz_rows(count: int) -> list[Row]:
    """Return rows with `count` bodies in all, the same in every run, and `nothing` for comparison."""
    rows = [Row("nothing", lambda port: [], server="small")]
    for endpoint in ENDPOINTS:
        drawn = draw(bodies(endpoint), -(-count // len(ENDPOINTS)))
        for start in range(0, len(drawn), ROWS_AN_ENDPOINT):
            part = drawn[start : start + ROWS_AN_ENDPOINT]

            def make(port: int, endpoint: str = endpoint, part: Sequence[bytes] = part) -> list[RawRequest]:
                made_id = _made(port, MADE_FIRST.get(endpoint))
                every = [posted(port, endpoint, filled(data, made_id)) for data in part]
                return [RawRequest(data, disconnect_after_s=DISCONNECT_AFTER_S) for data in every]

            server = "stored" if endpoint in MADE_FIRST else "small"
            rows.append(Row(f"{endpoint} {start}", make, concurrency=CONCURRENCY, server=server))
    share = -(-count // len(ENDPOINTS))
    return rows + _pooled(share) + _stored(share) + _passed_on(share) + _answered(share) + _reports(share)


def _made(port: int, first: Made | None) -> str:
    """Make what bodies refer to, if anything; return its id."""
    return "" if first is None else made(port, first.path, first.body, first.headers["Content-Type"])


def _pooled(count: int) -> list[Row]:
    """Return rows with inputs of embeddings, scores and rankings."""

    def row(endpoint: str) -> Row:
        drawn = draw(bodies(endpoint), count)

        def make(port: int) -> list[RawRequest]:
            return [RawRequest(posted(port, endpoint, data), disconnect_after_s=DISCONNECT_AFTER_S) for data in drawn]

        return Row(endpoint, make, concurrency=CONCURRENCY, server="embedding")

    return [row(endpoint) for endpoint in POOLED]


def _stored(count: int) -> list[Row]:
    """Return rows with changes of what is stored, and with files and batches."""

    def row(path: str, stored: StoredBody) -> Row:
        drawn = draw(stored.bodies, count)

        def make(port: int) -> list[RawRequest]:
            made_id = _made(port, stored.made)
            where, kind = path.replace("{id}", made_id), stored.headers["Content-Type"]
            return [RawRequest(posted(port, where, filled(data, made_id), kind)) for data in drawn]

        return Row(path, make, concurrency=CONCURRENCY, server="stored")

    return [row(path, stored) for path, stored in STORED_BODIES.items()]


def _reports(count: int) -> list[Row]:
    """Return rows with questions about usage."""

    def row(report: str) -> Row:
        drawn = draw(paths(report), count)

        def make(port: int) -> list[RawRequest]:
            return [got(path) for path in drawn]

        return Row(f"GET {report}", make, concurrency=CONCURRENCY, server="booked")

    return [row(report) for report in REPORTS]


def _passed_on(count: int) -> list[Row]:
    """Return rows with bodies for an upstream's model."""

    def row(endpoint: str) -> Row:
        drawn = [data.replace(b'"demo"', b'"%b"' % MODEL.encode(), 1) for data in draw(bodies(endpoint), count)]

        def make(port: int) -> list[RawRequest]:
            return [RawRequest(posted(port, endpoint, data), disconnect_after_s=DISCONNECT_AFTER_S) for data in drawn]

        return Row(f"passed on: {endpoint}", make, concurrency=CONCURRENCY, server="passing")

    return [row(endpoint) for endpoint in (CHAT, COMPLETIONS)]


def _answered(count: int) -> list[Row]:
    """Return rows with requests whose answers are drawn."""

    def row(name: str, *, streams: bool) -> Row:
        def make(port: int) -> list[RawRequest]:
            asked = [chat([said("Hi.")], model=MODEL, user=f"drawn {at}", stream=streams) for at in range(count)]
            return [
                RawRequest(posted(port, CHAT, json.dumps(body).encode()), disconnect_after_s=DISCONNECT_AFTER_S)
                for body in asked
            ]

        return Row(f"drawn answers: {name}", make, concurrency=CONCURRENCY, server="passing", fails=True)

    return [row("whole", streams=False), row("streams", streams=True)]


def draw(strategy: SearchStrategy[T], count: int) -> list[T]:
    """Return `count` values, the same every time."""
    drawn: list[T] = []

    @seed(0)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(data: T) -> None:
        drawn.append(data)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collect()
    return drawn
