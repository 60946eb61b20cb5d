"""The servers of `bench.accounting`: `quipu serve` unchanged, or with an accountant that keeps no accounts.

    python -m bench.accounting_null books|null FLAGS...

`null` does only what clients need of an accountant to get a response: it forwards tokens and reports when a response
starts and ends. It writes no entries, checks no invariants, counts nothing and keeps no records; the ledger is open but
unused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import attrs

from quipu.actors.accountant.entry_store import AccountantMessage, EntryStore
from quipu.actors.accountant.journal import Journal
from quipu.actors.accountant.metrics import Metrics
from quipu.actors.channel import Receiver, Sender
from quipu.actors.fleet.processes.process_host import ProcessHost
from quipu.actors.messages.accountant import Completed, Left, OpenAccount, Prompted, StepReport
from quipu.actors.messages.counts import Known
from quipu.actors.messages.detokenizer import Tokens
from quipu.actors.messages.handler import Closed, Outlet, Started
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.desk import RequestDesk
from quipu.actors.wiring import open_runtime
from quipu.web.cli import cli
from quipu.web.cli import serve as serve_command


@attrs.define(eq=False)
class OpenRequest:
    outlet: Outlet
    prompted: Prompted | None = None
    num_ends: int = 0
    """Terminals and completions received so far: two per sequence."""


class NullAccountant:
    def __init__(
        self,
        entry_store: EntryStore,
        metrics: Metrics,
        desk: RequestDesk,
        journal: Journal,
        detokenizer: Sender[Tokens],
    ) -> None:
        self._desk = desk
        self._detokenizer = detokenizer
        self._open: dict[str, OpenRequest] = {}
        self._by_sequence: dict[int, str] = {}

    async def run(self, inbox: Receiver[AccountantMessage]) -> None:
        while True:
            for message in await inbox.receive_all():
                match message:
                    case StepReport():
                        await self._report(message)
                    case OpenAccount():
                        self._open[message.request_id] = OpenRequest(message.outlet)
                    case Prompted():
                        if (request := self._open.get(message.request_id)) is not None:
                            request.prompted = message
                            self._by_sequence |= dict.fromkeys(message.sequence_ids, message.request_id)
                    case Completed():
                        self._ended(message.request_id)
                    case Left():
                        self._forget(message.request_id)

    async def _report(self, report: StepReport) -> None:
        for sequence_id in report.admitted_ids:
            if (request := self._open.get(self._by_sequence.get(sequence_id, ""))) is not None:
                request.outlet.put(Started(None, None, None))
        if report.token_ids:
            columns = (report.token_sequence_ids, report.token_ids, report.ended_ids, report.ended_reasons)
            await self._detokenizer.send(Tokens(*columns, report.payloads))
        for sequence_id in report.terminal_ids:
            self._desk.sequences.mark_ended(sequence_id)
            self._ended(self._by_sequence.get(sequence_id, ""))

    def _ended(self, request_id: str) -> None:
        request = self._open.get(request_id)
        if request is None or request.prompted is None:
            return
        request.num_ends += 1
        if request.num_ends == 2 * len(request.prompted.sequence_ids):
            nothing = Known(0)  # what usage reports
            record = UsageRecord(
                request_id=request_id, outcome=Outcome.FINISHED, prompt=nothing, cached=nothing, cache_write=nothing
            )
            request.outlet.put(Closed(record, None))
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        request = self._open.pop(request_id, None)
        if request is not None and request.prompted is not None:
            for sequence_id in request.prompted.sequence_ids:
                self._by_sequence.pop(sequence_id, None)


def split(config: Any, info: Any, journal: Any = None) -> Any:
    """Replace `wiring.split`; only the accountant and its journal differ."""
    environment = dict(os.environ)
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    host = ProcessHost(config.engine, environment)
    make_accountant: Callable[..., Any] = NullAccountant
    return open_runtime(config, info, lambda _: host, make_accountant=make_accountant, encode_apart=True)


if __name__ == "__main__":
    which, *flags = sys.argv[1:]
    if which == "null":
        setattr(serve_command, "split", split)  # noqa: B010 - an imported name, which mypy does not let others assign
    sys.exit(cli.main(["serve", *flags]))
