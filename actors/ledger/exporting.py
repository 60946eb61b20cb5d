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
from itertools import islice
from typing import Any, BinaryIO, Final

import orjson

from .database import LedgerError
from .fields import FIELD_NAMES, Value, flatten
from .reading import LedgerRecord
from .schema import records as table

EXPORT_NAMES: Final = (*FIELD_NAMES, "recovered", "server", "number", "hash")
_GROUP_ROWS: Final = 10_000


class ExportFormat(StrEnum):
    CSV = "csv"
    JSONL = "jsonl"
    PARQUET = "parquet"


def export(found: Iterable[LedgerRecord], format_: ExportFormat, output: BinaryIO) -> int:
    """Write records and return how many there were. Raises LedgerError."""
    match format_:
        case ExportFormat.CSV:
            return _export_csv(found, output)
        case ExportFormat.JSONL:
            return _export_jsonl(found, output)
        case ExportFormat.PARQUET:
            return _export_parquet(found, output)


def values_of(found: LedgerRecord) -> dict[str, Value]:
    """Return one record's values by the names of EXPORT_NAMES."""
    own: dict[str, Value] = {
        "recovered": found.recovered,
        "server": found.server,
        "number": found.number,
        "hash": found.hash,
    }
    return flatten(found.record) | own


def _export_csv(found: Iterable[LedgerRecord], output: BinaryIO) -> int:
    text = io.TextIOWrapper(output, "utf-8", newline="", write_through=True)
    writer = csv.DictWriter(text, EXPORT_NAMES)
    writer.writeheader()
    num_records = 0
    for one in found:
        writer.writerow({name: _plain(value) for name, value in values_of(one).items()})
        num_records += 1
    text.detach()
    return num_records


def _plain(value: Value) -> Value:
    """Quote text that a spreadsheet would run as a formula, since clients choose some of these texts."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return "'" + value
    return value


def _export_jsonl(found: Iterable[LedgerRecord], output: BinaryIO) -> int:
    num_records = 0
    for one in found:
        output.write(orjson.dumps(values_of(one)) + b"\n")
        num_records += 1
    return num_records


def _export_parquet(found: Iterable[LedgerRecord], output: BinaryIO) -> int:
    try:
        pa: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise LedgerError("Parquet needs pyarrow: pip install './quipu_llm-….whl[parquet]'") from None
    kinds = {"text": pa.string(), "big_integer": pa.int64(), "double": pa.float64(), "boolean": pa.bool_()}
    columns = [(name, kinds[table.c[name].type.__visit_name__]) for name in EXPORT_NAMES]
    schema = pa.schema(columns)
    num_records = 0
    with parquet.ParquetWriter(output, schema) as writer:
        for group in _groups(found):
            writer.write_table(pa.Table.from_pylist([values_of(one) for one in group], schema=schema))
            num_records += len(group)
    return num_records


def _groups(found: Iterable[LedgerRecord]) -> Iterator[list[LedgerRecord]]:
    remaining = iter(found)
    while group := list(islice(remaining, _GROUP_ROWS)):
        yield group
