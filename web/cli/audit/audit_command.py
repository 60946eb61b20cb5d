"""`quipu audit`: from flags to a report, and the exit code.

Standard output gets the report and nothing else; progress and errors go to standard error. Exit codes: 0 if nothing was
found false, 1 if something was, 2 for invalid flags and files and for servers that cannot be audited.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import anyio
import httpx2

from quipu.actors.shared.error_groups import first_leaf
from quipu.actors.shared.terminals import can_redraw

from ..command_output import EXIT_FAILED, EXIT_INTERRUPTED, complain, indented, print_result
from ..command_progress import command_progress
from ..server_flags import KEY_VARIABLE
from .audit_flags import make_parser
from .audit_page import render_page
from .audit_report import describe, render_table
from .audit_run import Outcome, Plan, run_audit
from .comparison import NoReport, describe_comparison, read_audit, render_comparison
from .probing import NothingToAudit
from .request_body import Target
from .verdicts import Verdict

KEEPALIVE_S = 2.0
"""Shorter than servers keep idle connections, so that no request is sent on one that is being closed."""


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` is without `audit`. Returns the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.compare is not None:
        return _compare(arguments)
    if arguments.url is None:
        parser.error("give the URL of a server")
    began_s = time.monotonic()
    try:
        outcome = anyio.run(_audit, arguments, backend="trio")
    except BaseExceptionGroup as group:  # of whichever task was running
        return _complain_of(first_leaf(group))
    except (NothingToAudit, KeyboardInterrupt) as error:
        return _complain_of(error)
    report = describe(outcome, time.monotonic() - began_s)
    return _publish(arguments, report)


def make_plan(arguments: argparse.Namespace) -> Plan:
    key = arguments.key or os.environ.get(KEY_VARIABLE)
    target = Target(arguments.url, arguments.model or "", key, arguments.other_key, dict(arguments.header))
    return Plan(
        target=target,
        apis=arguments.api,
        metrics_url=arguments.metrics_url,
        has_pressure=arguments.pressure,
        prompt_tokens=arguments.prompt_tokens,
        prompt_format=arguments.prompt_format,
        budget=arguments.budget,
        concurrency=arguments.concurrency,
        timeout_s=arguments.timeout,
        max_time_s=arguments.max_time,
    )


async def _audit(arguments: argparse.Namespace) -> Outcome:
    is_off, draws = arguments.quiet or arguments.json, can_redraw(sys.stderr)
    say = _say if draws and not is_off else lambda text: None
    limits = httpx2.Limits(max_connections=arguments.concurrency, keepalive_expiry=KEEPALIVE_S)
    headers = {"Accept-Encoding": "identity"}
    async with httpx2.AsyncClient(headers=headers, limits=limits, timeout=None, trust_env=False) as http:
        try:
            with command_progress("auditing", is_off=is_off or draws):  # elsewhere a line now and then
                return await run_audit(make_plan(arguments), http, say)
        finally:
            say("")


def _publish(arguments: argparse.Namespace, report: dict[str, Any]) -> int:
    text = indented(report).decode() if arguments.json else render_table(report)
    print_result(text.rstrip("\n"))
    if arguments.html is not None:
        try:
            arguments.html.write_text(render_page(report), "utf-8")
        except OSError as error:
            return complain(f"--html {arguments.html}: {error.strerror}")
    return EXIT_FAILED if report["verdicts"][str(Verdict.FALSE)] else 0


def _compare(arguments: argparse.Namespace) -> int:
    try:
        audits = [read_audit(path) for path in arguments.compare]
    except NoReport as error:
        return complain(error)
    comparison = describe_comparison(arguments.compare, audits)
    text = indented(comparison).decode() if arguments.json else render_comparison(comparison)
    return print_result(text.rstrip("\n"))


def _complain_of(error: BaseException) -> int:
    if isinstance(error, NothingToAudit):
        return complain(error)
    if isinstance(error, KeyboardInterrupt):
        return complain("interrupted: nothing is reported", EXIT_INTERRUPTED)
    raise error


def _say(text: str) -> None:
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
