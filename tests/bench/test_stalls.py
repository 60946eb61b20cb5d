"""The stall benchmark runs, prints the documented fields, and detects violations of the guarantee."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.stalls.__main__ import QUICK, Seen, faults_of
from bench.stalls.row_parts import Row
from bench.stalls.rows import ROWS

NOTHING = Seen("nothing", gap_ms=20.0, health_ms=5.0, alive=True)


def test_quick_run_prints_rows() -> None:
    """A few rows against a real server: the same process responds after each, and every field is present."""
    command = [sys.executable, "-m", "bench.stalls", "--quick", "--json", "--streams", "4"]
    done = subprocess.run(command, capture_output=True, timeout=250, check=True)
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == [row.name for row in ROWS if row.name in QUICK]
    for row in rows:
        assert set(row) == {"name", "gap_ms", "health_ms", "peak_mib", "status", "alive"}
        assert row["alive"]
        assert row["gap_ms"] > 0 and row["health_ms"] > 0 and row["peak_mib"] > 0
        assert row["status"] == (0 if row["name"] == "nothing" else 200) or row["name"].startswith("JSON")


@pytest.mark.parametrize(
    ("seen", "fault"),
    [
        (Seen("row", gap_ms=69.9, health_ms=54.9, status=400), None),
        (Seen("row", gap_ms=70.1), "streams waited"),
        (Seen("row", health_ms=55.1), "/health waited"),
        (Seen("small", health_ms=104.9), None),
        (Seen("small", health_ms=105.1), "a small request waited"),
        (Seen("row", alive=False), "died"),
        (Seen("row", status=500), "status 500"),
        (Seen("row", status=503), "status 503"),
        (Seen("full", status=503), None),
        (Seen("full", status=500), "status 500"),
    ],
)
def test_faults(seen: Seen, fault: str | None) -> None:
    """Faults are: more delay over `nothing` than the row allows, a dead server, and an unexpected 5xx."""
    rows = [Row("nothing", lambda port: []), Row("row", lambda port: []), Row("full", lambda port: [], refused=True)]
    rows.append(Row("small", lambda port: [], probe=lambda port: b"", allowed_ms=100))
    found = faults_of([NOTHING, seen], rows)
    assert (fault is None and not found) or (fault is not None and fault in found[0])


def test_row_names_are_unique() -> None:
    """Rows are selected by name."""
    assert len({row.name for row in ROWS}) == len(ROWS)
