"""Compares the ledger with the counters: `quipu ledger reconcile`.

Counters live as long as their server. So each server's own records are summed and compared with the counters that it
wrote when it stopped, or with the ones that it shows now; a server that was killed left none. Records closed by
recovery are left out. Requests that were counted but not written (`unadmitted.py`) have a counter of their own, which
is added to the ledger's number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs
import sqlalchemy as sa

from ..messages.outcomes import Outcome
from .entries import Entry, EntryKind, parse_text
from .fields import TIERS
from .folder import LedgerFolder
from .queries import SumBuilder
from .reading import LedgerReader, entries_after, open_reader
from .schema import marks
from .segment_files import BEGINNING
from .unadmitted import LIMITED

DISPUTED: Final = "usage_disputed_total"
SUPPRESSED: Final = "usage_records_suppressed_total"
OPEN: Final = "open_accounts"
_LABEL: Final = re.compile(r'(\w+)="(?:[^"\\]|\\.)*"')


@attrs.frozen
class Comparison:
    """One number, according to the ledger and to the counters."""

    name: str
    ledger: float
    counter: float | None

    @property
    def agrees(self) -> bool:
        return self.counter is None or self.counter == self.ledger


@attrs.frozen
class ServerAccount:
    """The comparison for one server, from its start to its end."""

    server: str
    started_at: float
    ended: str
    """`stopped`, `running` or `killed`."""
    num_recovered: int
    """Records that it closed for servers that had died."""
    num_disputed: int
    num_open: int
    """Accounts that were open when the counters were read, whose prompts are counted already."""
    num_suppressed: int
    """Requests without a record, according to the counters. Added to those that have one."""
    lines: tuple[Comparison, ...]

    @property
    def agrees(self) -> bool:
        return all(line.agrees for line in self.lines)


def reconcile(
    *, data_dir: Path | None = None, url: str | None = None, live: Mapping[str, float] | None = None
) -> list[ServerAccount]:
    """Compare every server in the ledger, oldest first. `live`: the running server's counters. Raises LedgerError."""
    folder = None if data_dir is None else LedgerFolder(data_dir)
    with open_reader(data_dir=data_dir, url=url) as reader:
        starts, stops = _marks(reader, folder)
        sums = _sums(reader)
        accounts = []
        ordered = sorted(starts.values(), key=lambda start: start.at)
        for start in ordered:
            stop = stops.get(start.server)
            counters = None if stop is None else stop.values.get("counters")
            is_running = start is ordered[-1] and folder is not None and folder.is_in_use
            ended = "stopped" if stop is not None else "running" if is_running else "killed"
            if stop is None and live is not None and _shows(live, start, is_last=start is ordered[-1]):
                counters, ended = live, "running"
            accounts.append(_account(start, ended, sums.get(start.server) or _Sums(), counters))
        return accounts


def _shows(live: Mapping[str, float], start: Entry, *, is_last: bool) -> bool:
    """Whether these counters are that server's. Counters that name no server belong to the last one."""
    names = [name for name in live if name.startswith("ledger_info{")]
    return any(f'server="{start.server}"' in name for name in names) if names else is_last


@attrs.define
class _Sums:
    """Sums over one server's own records."""

    tokens: SumBuilder = attrs.field(factory=lambda: SumBuilder((), None, as_booked=True))
    by_outcome: dict[str, int] = attrs.field(factory=dict)
    num_recovered: int = 0


def _sums(reader: LedgerReader) -> dict[str, _Sums]:
    by_server: dict[str, _Sums] = {}
    for found in reader.records():
        sums = by_server.setdefault(found.server, _Sums())
        if found.recovered:
            sums.num_recovered += 1
            continue
        sums.tokens.add_record(found.record)
        outcome = found.record.outcome.value
        sums.by_outcome[outcome] = sums.by_outcome.get(outcome, 0) + 1
    return by_server


def _account(start: Entry, ended: str, sums: _Sums, counters: Mapping[str, float] | None) -> ServerAccount:
    (total,) = sums.tokens.sums()
    values = counters or {}
    suppressed = {outcome: int(values.get(f'{SUPPRESSED}{{outcome="{outcome}"}}', 0)) for outcome in LIMITED}
    suppressed[Outcome.REJECTED] += int(values.get(SUPPRESSED, 0))  # as servers wrote it that knew no others
    by_outcome = {outcome: sums.by_outcome.get(outcome, 0) + suppressed.get(outcome, 0) for outcome in Outcome}
    ledger: dict[str, float] = {
        "prompt_tokens_total": total.prompt_tokens,
        "prefix_cache_queries_total": total.queried_tokens,
        "prefix_cache_hits_total": total.cached_tokens,
        **{f'cached_tokens_total{{tier="{tier}"}}': getattr(total, f"cached_{tier}_tokens") for tier in TIERS},
        "generation_tokens_total": total.completion_tokens,
        "recomputed_tokens_total": total.recomputed_tokens,
        "moved_tokens_total": total.moved_tokens,
        "spec_decode_num_draft_tokens_total": total.draft_tokens,
        "spec_decode_num_accepted_tokens_total": total.accepted_draft_tokens,
        **{f'requests_total{{outcome="{outcome}"}}': by_outcome[outcome] for outcome in Outcome},
        DISPUTED: total.num_disputed,
    }
    lines = tuple(
        # a counter that was never incremented may be absent
        Comparison(name, number, values.get(name, 0.0) if counters is not None else None)
        for name, number in ledger.items()
    )
    return ServerAccount(
        start.server,
        start.at,
        ended,
        sums.num_recovered,
        total.num_disputed,
        int(values.get(OPEN, 0)),
        sum(suppressed.values()),
        lines,
    )


def _marks(reader: LedgerReader, folder: LedgerFolder | None) -> tuple[dict[str, Entry], dict[str, Entry]]:
    found: list[Entry | None] = []
    with reader.connection() as connection:
        if connection is not None:
            rows = connection.execute(sa.select(marks.c.entry, marks.c.hash)).all()
            found += [parse_text(row.entry, row.hash) for row in rows]
    if folder is not None:
        found += entries_after(folder, BEGINNING)
    entries = [entry for entry in found if entry is not None]
    starts = {entry.server: entry for entry in entries if entry.kind is EntryKind.START}
    return starts, {entry.server: entry for entry in entries if entry.kind is EntryKind.STOP}


def parse_metrics(text: str) -> dict[str, float]:
    """Parse the Prometheus text format into values by name and labels, without `quipu:` and the model's name.

    Values of several engines are added.
    """
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("quipu:"):
            continue
        name, _, value = line.removeprefix("quipu:").rpartition(" ")
        bare, _, labels = name.partition("{")
        kept = [found.group() for found in _LABEL.finditer(labels) if found[1] not in ("model_name", "engine")]
        key = f"{bare}{{{','.join(kept)}}}" if kept else bare
        samples[key] = samples.get(key, 0.0) + float(value)
    return samples
