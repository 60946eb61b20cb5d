"""Exports the ledger's records as CSV, JSON lines or Parquet: `quipu ledger export`.

Fields are named as in `fields.py`, followed by the record's place in the chain. Times are Unix seconds; unknown values
are empty (CSV) or null.
"""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import count, islice
from typing import Any, BinaryIO, Final

import orjson

from .database import LedgerError
from .fields import FIELD_NAMES, Value, flatten
from .reading import LedgerRecord
from .schema import records as table

_PLACE: Final = ("recovered", "server", "number", "hash")
EXPORT_NAMES: Final = (*FIELD_NAMES, *_PLACE)
_GROUP_ROWS: Final = 10_000


class ExportFormat(StrEnum):
    CSV = "csv"
    JSONL = "jsonl"
    PARQUET = "parquet"


def export(found: Iterable[LedgerRecord], format_: ExportFormat, output: BinaryIO) -> int:
    """Write records and return how many there were. Raises LedgerError."""
    numbers = count()
    rows = (values_of(one) for one, _ in zip(found, numbers, strict=False))
    writers = {ExportFormat.CSV: _export_csv, ExportFormat.JSONL: _export_jsonl, ExportFormat.PARQUET: _export_parquet}
    writers[format_](rows, output)
    return next(numbers)


def values_of(found: LedgerRecord) -> dict[str, Value]:
    return flatten(found.record) | {name: getattr(found, name) for name in _PLACE}


def _export_csv(rows: Iterator[dict[str, Value]], output: BinaryIO) -> None:
    text = io.TextIOWrapper(output, "utf-8", newline="", write_through=True)
    writer = csv.DictWriter(text, EXPORT_NAMES)
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    text.detach()


def _plain(value: Value) -> Value:
    """Quote text that a spreadsheet would run as a formula, since clients choose some of these texts."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return "'" + value
    return value


def _export_jsonl(rows: Iterator[dict[str, Value]], output: BinaryIO) -> None:
    output.writelines(orjson.dumps(row) + b"\n" for row in rows)


def _export_parquet(rows: Iterator[dict[str, Value]], output: BinaryIO) -> None:
    try:
        pa: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise LedgerError("Parquet needs pyarrow: pip install './quipu_llm-….whl[parquet]'") from None
    kinds = {"text": pa.string(), "big_integer": pa.int64(), "double": pa.float64(), "boolean": pa.bool_()}
    schema = pa.schema([(name, kinds[table.c[name].type.__visit_name__]) for name in EXPORT_NAMES])
    with parquet.ParquetWriter(output, schema) as writer:
        while group := list(islice(rows, _GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
