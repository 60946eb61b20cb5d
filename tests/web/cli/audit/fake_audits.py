"""Audits of the fake server, on a clock that jumps: what takes minutes takes a second."""

from __future__ import annotations

import math
import random
from typing import Any

import httpx2
import trio
import trio.testing

from quipu.web.cli.audit.audit_run import Outcome, Plan, run_audit
from quipu.web.cli.audit.exchange import PATHS
from quipu.web.cli.audit.request_body import Target
from quipu.web.cli.audit.verdicts import Finding, Verdict
from tests.web.cli.audit.fake_server import FakeServer

URL = "http://fake"


def audit(server: httpx2.AsyncBaseTransport, seed: int = 0, **changes: Any) -> Outcome:
    """Audit a server that is a transport, and return the outcome."""
    outcome = audit_until(math.inf, server, seed, **changes)
    assert outcome is not None
    return outcome


def audit_until(end_s: float, server: httpx2.AsyncBaseTransport, seed: int = 0, **changes: Any) -> Outcome | None:
    """Audit a server, or cancel that at a time of the server's clock; return the outcome, if there is one."""
    fields: dict[str, Any] = {
        "target": Target(URL, ""),
        "apis": tuple(PATHS),
        "prompt_tokens": 400,
        "budget": 10_000_000,
        "concurrency": 4,
        "timeout_s": 120.0,
        "max_time_s": math.inf,
    }

    async def main() -> Outcome | None:
        with trio.move_on_after(end_s):
            async with httpx2.AsyncClient(transport=server, timeout=None) as http:
                return await run_audit(Plan(**(fields | changes)), http, draw=random.Random(seed))
        return None

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def verdicts_of(outcome: Outcome, verdict: Verdict) -> dict[str, list[Finding]]:
    """Return the findings with a verdict, by check."""
    found: dict[str, list[Finding]] = {}
    for finding in outcome.findings:
        if finding.verdict is verdict:
            found.setdefault(finding.check, []).append(finding)
    return found


def accused(server: FakeServer, **changes: Any) -> dict[str, list[str]]:
    """Return what an audit calls false, with its reasons."""
    found = verdicts_of(audit(server, **changes), Verdict.FALSE)
    return {check: [f"{finding.api}: {finding.reason}" for finding in findings] for check, findings in found.items()}
