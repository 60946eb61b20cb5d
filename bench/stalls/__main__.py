"""Measure how long one client can delay the others, whatever it sends.

    python -m bench.stalls [--json] [--row NAME] [--streams 32] [--rounds 3] [--fuzz N] [--quick] [--busy N]

The server runs the fake executor at ten milliseconds per token; the benchmark keeps streams open and requests `/health`
every ten milliseconds. It sends each row three times and prints the worst that the other clients saw: the longest gap
between two events of one stream, the longest wait for `/health`, the peak memory of the server's processes, the worst
response status, and whether the same process still responds. The exit code is 1 if a row is worse than the row
`nothing` by more than 50 ms, if the server died, or if it responded with a 5xx (except in rows that expect an
overload). In the row `100 tokens beside 16 texts of 8 MB` a small completion replaces `/health` and may wait 100 ms
longer. `--fuzz N` sends N random bodies made of each endpoint's own fields instead (`bench/bodies.py`), and requests
that an upstream answers with drawn heads and bodies (`drawn_answers.py`). `--busy N` measures beside N processes of the
lowest priority that compute all the time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

from bench.stalls.attack import run_attack
from bench.stalls.busy import busy
from bench.stalls.monitor import Monitor
from bench.stalls.row_parts import ALLOWED_MS, Row
from bench.stalls.rows import ROWS
from bench.stalls.servers import Server, serving

SETTLE_S = 0.5
NOTHING_S = 3.0
QUICK = ("nothing", "prompt of 0.5 MB", "JSON of empty lists", "10,000 messages", "upstream: line of 1 MB")
OVERLOADED = (503, 529)
FAILED = (502, 503)
"""What a client gets where an upstream fails."""


@attrs.define
class Seen:
    """The worst results of several rounds of one row."""

    name: str
    gap_ms: float = 0.0
    health_ms: float = 0.0
    peak_mib: float = 0.0
    status: int = 0
    alive: bool = True

    def add(self, gap_ms: float, health_ms: float, peak_mib: float, statuses: Sequence[int], alive: bool) -> None:
        self.gap_ms = max(self.gap_ms, round(gap_ms, 1))
        self.health_ms = max(self.health_ms, round(health_ms, 1))
        self.peak_mib = max(self.peak_mib, round(peak_mib, 1))
        self.status = max(self.status, *statuses, 0)
        self.alive = self.alive and alive


def send_row(server: Server, monitor: Monitor, seen: Seen, row: Row) -> None:
    """Run one round of a row."""
    raws = row.make(server.port)
    probe = row.probe(server.port) if row.probe is not None else None
    server.reset_peak()
    monitor.begin(probe)
    if raws:
        statuses = run_attack(server.port, raws, row.concurrency)
        time.sleep(SETTLE_S)
    else:
        statuses = []
        time.sleep(NOTHING_S)
    waits = monitor.end()
    alive = server.is_alive
    seen.add(waits.gap_s * 1000, waits.health_s * 1000, server.peak_mib() if alive else 0, statuses, alive)


def measure(rows: Sequence[Row], num_streams: int, rounds: int, *, verbose: bool) -> list[Seen]:
    found: list[Seen] = []
    kinds = dict.fromkeys(row.server for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            pending = [row for row in rows if row.server == kind]
            while pending:
                pending = _measure_kind(pending, kind, Path(folder), found, num_streams, rounds, verbose)
    order = {row.name: at for at, row in enumerate(rows)}
    return sorted(found, key=lambda seen: order[seen.name])


def _measure_kind(
    rows: list[Row], kind: str, folder: Path, found: list[Seen], num_streams: int, rounds: int, verbose: bool
) -> list[Row]:
    """Measure rows until one of them kills the server; return the remaining rows."""
    with ExitStack() as stack:
        server = stack.enter_context(serving(kind, folder / f"{kind}-{len(found)}"))
        monitor = stack.enter_context(Monitor(server.port, num_streams))
        time.sleep(1.0)
        for at, row in enumerate(rows):
            seen = Seen(row.name)
            found.append(seen)
            for _ in range(rounds):
                send_row(server, monitor, seen, row)
                if not seen.alive:
                    break
                time.sleep(SETTLE_S)
            if verbose:
                print(_line(seen), flush=True)
            if not seen.alive:
                return rows[at + 1 :]
    return []


def faults_of(found: Sequence[Seen], rows: Sequence[Row]) -> list[str]:
    """Describe every violation of the guarantee."""
    nothing = next((seen for seen in found if seen.name == "nothing"), Seen("nothing"))
    by_name = {row.name: row for row in rows}
    faults = []
    for seen in found:
        if seen.gap_ms > nothing.gap_ms + ALLOWED_MS:
            faults.append(f"{seen.name}: streams waited {seen.gap_ms} ms ({nothing.gap_ms} with nothing)")
        row = by_name[seen.name]
        if seen.health_ms > nothing.health_ms + row.allowed_ms:
            what = "/health" if row.probe is None else "a small request"
            faults.append(f"{seen.name}: {what} waited {seen.health_ms} ms ({nothing.health_ms} with nothing)")
        if not seen.alive:
            faults.append(f"{seen.name}: the server died")
        is_expected = (row.refused and seen.status in OVERLOADED) or (row.fails and seen.status in FAILED)
        if seen.status >= 500 and not is_expected:
            faults.append(f"{seen.name}: status {seen.status}")
    return faults


def _line(seen: Seen) -> str:
    alive = "alive" if seen.alive else "DEAD"
    return (
        f"{seen.name:36} gap {seen.gap_ms:8.1f} ms   health {seen.health_ms:8.1f} ms   "
        f"{seen.peak_mib:7.0f} MiB   {seen.status:3}   {alive}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.stalls", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--row", action="append", metavar="NAME", help="only this row and `nothing`; may be repeated")
    parser.add_argument("--streams", type=int, default=32, help="streams that other clients keep open")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per row; the worst counts")
    parser.add_argument("--fuzz", type=int, metavar="N", help="send N random bodies instead of the rows")
    parser.add_argument("--quick", action="store_true", help="smoke test: a few rows, once")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="beside N niced processes that compute")
    arguments = parser.parse_args()
    if arguments.fuzz is not None:
        from bench.stalls.fuzz import fuzz_rows  # loads hypothesis

        rows = fuzz_rows(arguments.fuzz)
    elif arguments.row:
        rows = [row for row in ROWS if row.name in ("nothing", *arguments.row)]
        if unknown := set(arguments.row) - {row.name for row in rows}:
            parser.error(f"unknown row: {', '.join(sorted(unknown))}; known rows: {', '.join(r.name for r in ROWS)}")
    else:
        rows = [row for row in ROWS if not arguments.quick or row.name in QUICK]
    rounds = 1 if arguments.quick or arguments.fuzz is not None else arguments.rounds
    with busy(arguments.busy):
        found = measure(rows, arguments.streams, rounds, verbose=not arguments.json)
    if arguments.json:
        print(json.dumps({"rows": [attrs.asdict(seen) for seen in found]}))
    faults = faults_of(found, rows)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
