"""A ledger of 100,000 records for the rows that read usage reports, made before their server starts.

It is in the server's data directory, or in the empty database that `QUIPU_LEDGER_URL` names.
"""

from __future__ import annotations

import os
from pathlib import Path

import sqlalchemy as sa

from quipu.actors.ledger.database import make_engine, migrate, sqlite_url
from quipu.actors.ledger.fields import DEFAULTS
from quipu.actors.ledger.folder import FOLDER
from quipu.actors.ledger.schema import records
from quipu.kernels.step_types import SequenceKind

FIRST_S = 1_699_999_200
"""When the first hour begins, in Unix seconds."""
NUM_HOURS = 1000
NUM_TENANTS = 5
NUM_MODELS = 4
NUM_KEYS = 50
"""Of all tenants together."""
NUM_RECORDS = 100_000
PER_HOUR = NUM_RECORDS // NUM_HOURS
URL_VARIABLE = "QUIPU_LEDGER_URL"
_BATCH = 10_000


def request_id_of(number: int) -> str:
    return f"req-{number:024x}"


def write_ledger(data_dir: Path) -> None:
    """Make the ledger, unless the database has it already, as when a row has killed its server."""
    (data_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    engine = make_engine(os.environ.get(URL_VARIABLE) or sqlite_url(data_dir))
    migrate(engine)
    with engine.begin() as connection:
        if not connection.scalar(sa.select(records.c.number).where(records.c.request_id == request_id_of(1))):
            for at in range(0, NUM_RECORDS, _BATCH):
                connection.execute(sa.insert(records), [_row(number) for number in range(at, at + _BATCH)])
    engine.dispose()


def _row(number: int) -> dict[str, object]:
    hour, of_hour = divmod(number, PER_HOUR)
    closed_at = FIRST_S + 3600.0 * hour + 36.0 * of_hour
    key = of_hour % NUM_KEYS
    own: dict[str, object] = {
        "request_id": request_id_of(number),
        "tenant": f"tenant-{key % NUM_TENANTS}",
        "key_id": f"key-{key:012x}",
        "model": f"model-{of_hour % NUM_MODELS}",
        "endpoint": "/v1/completions",
        "received_at": closed_at - 1.0,
        "admitted_at": closed_at - 1.0,
        "closed_at": closed_at,
        "outcome": "finished",
        "num_choices": 1,
        "prompt_tokens": 1000,
        "prompt_kind": "known",
        "cached_tokens": 512,
        "cached_kind": "known",
        "completion_tokens": 100,
        "disputed": number % 100 == 0,
        "kind": SequenceKind.GENERATE if of_hour % 2 else SequenceKind.EMBED,
    }
    chain = {"server": "srv-0", "number": number, "hash": "0" * 64, "previous": "0" * 64, "ledger": "l", "position": 0}
    return {**DEFAULTS, **own, "recovered": False, **chain, "entry": "e" * 600}
