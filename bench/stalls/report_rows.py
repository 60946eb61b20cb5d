"""Rows that ask for usage reports of a ledger of 100,000 records (`booked_ledger.py`): every endpoint that reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from bench.stalls.attack import RawRequest
from bench.stalls.booked_ledger import FIRST_S, NUM_HOURS, request_id_of
from bench.stalls.row_parts import Row, getting, got

TABLE = f"/ui/usage?since={FIRST_S}&until={FIRST_S + 3600 * NUM_HOURS}&bucket=1h"
OPENAI = f"/v1/organization/usage/completions?start_time={FIRST_S}"
EMBEDDINGS = f"/v1/organization/usage/embeddings?start_time={FIRST_S}"
ANTHROPIC = "/v1/organizations/usage_report/messages?starting_at=" + datetime.fromtimestamp(FIRST_S, UTC).strftime(
    "%Y-%m-%dT%H:%M:%SZ"
)
KEY_NAMES = "/ui/key-names?" + "&".join(f"id=key-{number}" for number in range(500))
BY_ALL = "&group_by=model&group_by=api_key_id&group_by="


def _leaving(path: str, times: int) -> Callable[[int], Sequence[RawRequest]]:
    return lambda port: [got(path, disconnect_after_s=0.2)] * times


def _records(port: int) -> Sequence[RawRequest]:
    return [got(f"/v1/usage/{request_id_of(number * 97)}") for number in range(200)]


def _receipts(port: int) -> Sequence[RawRequest]:
    return [got(f"/v1/usage/{request_id_of(number * 97)}/receipt") for number in range(200)]


REPORT_ROWS: Sequence[Row] = (
    Row("usage tables of 5,000 rows", getting(f"{TABLE}&by=tenant", 8), 8, "booked"),
    Row("usage tables of 5,000 rows, CSV", getting(f"{TABLE}&by=tenant&format=csv", 8), 8, "booked"),
    Row("usage tables of too many rows", getting(f"{TABLE}&by=model&by=api_key&by=tenant", 4), 4, "booked"),
    Row(
        "usage reports of OpenAI's, hours",
        getting(f"{OPENAI}&bucket_width=1h&limit=168{BY_ALL}project_id", 8),
        8,
        "booked",
    ),
    Row(
        "usage reports of OpenAI's, minutes",
        getting(f"{OPENAI}&bucket_width=1m&limit=1440{BY_ALL}project_id", 8),
        8,
        "booked",
    ),
    Row(
        "usage reports of OpenAI's, retries once",
        getting(f"{OPENAI}&limit=31&retries=collapse{BY_ALL}project_id", 8),
        8,
        "booked",
    ),
    Row(
        "usage reports of embeddings, minutes",
        getting(f"{EMBEDDINGS}&bucket_width=1m&limit=1440{BY_ALL}project_id", 8),
        8,
        "booked",
    ),
    Row(
        "usage reports of Anthropic's",
        getting(f"{ANTHROPIC}&bucket_width=1h&limit=168{BY_ALL}workspace_id", 8),
        8,
        "booked",
    ),
    Row("usage reports, left", _leaving(f"{OPENAI}&bucket_width=1h&limit=168{BY_ALL}project_id", 16), 8, "booked"),
    Row("64 usage reports at once", getting(f"{TABLE}&by=tenant", 64), 64, "booked", refused=True),
    Row("names of 500 keys", getting(KEY_NAMES, 8), 8, "booked"),
    Row("200 usage records", _records, 16, "booked", refused=True),
    Row("200 receipts", _receipts, 16, "booked", refused=True),
)
