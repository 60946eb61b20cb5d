"""`quipu bench serve`: from flags to report.

Standard output gets the report and nothing else; progress and errors go to standard error. Exit codes: 0 if a request
was completed, 1 if none was or the server could not be reached, 2 for invalid flags and files.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import anyio
import attrs

import quipu

from ..command_output import EXIT_FAILED, EXIT_INTERRUPTED, complain, indented
from ..command_progress import command_progress
from ..one_line_parser import OneLineParser, commands_of
from ..server_flags import KEY_VARIABLE
from .arguments import OFFLINE, ONLINE, check, make_serve_parser
from .client import Client, Target, open_client
from .datasets import make_arrivals_s, make_random_prompts, make_wording, make_workload, takes_ids
from .discovery import DiscoveryError, find_model, find_vocab_size
from .generated import Kind
from .load_generator import LoadResult, calm_collector, run_load
from .prompts import Wording
from .render import render_csv, render_table
from .report import describe_requests, summarize
from .workload import WorkloadError


@attrs.frozen
class Run:
    model: str
    num_prompts: int
    result: LoadResult


class WarmUpError(Exception):
    """A warm-up request failed, so the run was not started."""


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` is without `bench`. Returns the exit code."""
    if argv and argv[0] in OFFLINE:
        from .offline import main as offline  # loads the actors

        return offline(argv)
    arguments = make_serve_parser().parse_args(argv)
    if (wrong := check(arguments)) is not None:
        return complain(wrong)
    is_interrupted = False
    try:
        return _run(arguments)
    except* KeyboardInterrupt:  # raised in whichever task was running
        is_interrupted = True
    assert is_interrupted
    return complain("interrupted: nothing is reported", EXIT_INTERRUPTED)


def make_parser() -> OneLineParser:
    """Return a parser with the flags of all commands; to run one, that one's own is used."""
    from .offline_arguments import make_offline_parser

    parser = OneLineParser(prog="quipu bench", description="Measure a server or an engine.")
    take: Any = lambda *, of, **_: of  # noqa: E731 - argparse calls it as it would a class
    commands = parser.add_subparsers(dest="command", parser_class=take)
    for name, of in {**commands_of(make_serve_parser()), **commands_of(make_offline_parser())}.items():
        commands.add_parser(name, help=OFFLINE.get(name, ONLINE), of=of)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    try:
        run = anyio.run(measure, arguments, backend="trio")
    except WorkloadError as error:
        return complain(error)
    except (DiscoveryError, WarmUpError) as error:
        is_absent = isinstance(error, DiscoveryError) and error.kind == "connect"
        advice = "; start a server with `quipu serve`, or name one with --base-url" if is_absent else ""
        return complain(f"{error}{advice}", EXIT_FAILED)
    report = describe_run(arguments, run)
    _print(arguments, report)
    if arguments.save_result is not None:
        try:
            _save(arguments, report, run)
        except OSError as error:
            return complain(f"--save-result {arguments.save_result}: {error.strerror}", EXIT_FAILED)
    return 0 if report["completed"] else complain("no request completed", EXIT_FAILED)


async def measure(arguments: argparse.Namespace) -> Run:
    """Do the whole run. Raises WorkloadError, DiscoveryError and WarmUpError."""
    headers = make_headers(arguments)
    vocab_size = arguments.vocab_size
    if vocab_size is None and takes_ids(arguments):
        vocab_size = await find_vocab_size(arguments.base_url, headers)
    wording = make_wording(arguments, vocab_size)
    workload = make_workload(arguments, wording)
    model = arguments.model or await find_model(arguments.base_url, headers)
    async with open_client(make_target(arguments, model, headers)) as client:
        await _warm_up(arguments, wording, client)
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each connection is a file
        arrivals_s, most = make_arrivals_s(arguments, workload), arguments.max_concurrency
        is_off = arguments.disable_tqdm or arguments.json
        with calm_collector(), command_progress("requests", workload.num_asks, "requests", is_off=is_off) as count:
            result = await run_load(workload, client.ask, arrivals_s, max_concurrency=most, on_ended=count)
    return Run(model, workload.num_conversations, result)


def make_headers(arguments: argparse.Namespace) -> dict[str, str]:
    key = arguments.api_key or os.environ.get(KEY_VARIABLE)
    return ({"Authorization": f"Bearer {key}"} if key else {}) | dict(arguments.header)


def make_target(arguments: argparse.Namespace, model: str, headers: dict[str, str]) -> Target:
    fields: dict[str, Any] = {"model": model, "temperature": arguments.temperature}
    return Target(
        url=arguments.base_url + arguments.endpoint,
        headers=headers,
        fields=fields | ({"ignore_eos": True} if arguments.ignore_eos else {}),
        extra_fields=arguments.extra_body,
        timeout_s=arguments.request_timeout,
    )


def describe_run(arguments: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Return the report: the flags, then the results. It contains no key and no header."""
    rate = arguments.request_rate
    if rate is None:
        rate = "trace" if arguments.dataset_name == "trace" else math.inf
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quipu_version": quipu.__version__,
        "base_url": arguments.base_url,
        "endpoint": arguments.endpoint,
        "model": run.model,
        "dataset_name": arguments.dataset_name,
        "num_prompts": run.num_prompts,
        "seed": arguments.seed,
        "request_rate": "inf" if rate == math.inf else rate,  # JSON has no infinity
        "burstiness": "inf" if arguments.burstiness == math.inf else arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        **summarize(run.result, metrics=arguments.percentile_metrics, percentiles=arguments.metric_percentiles),
    }


async def _warm_up(arguments: argparse.Namespace, wording: Wording, client: Client) -> None:
    """Send warm-up requests. Their prompts are their own, so that the run finds none of them cached."""
    prompts = make_random_prompts(arguments, wording)
    for place in range(arguments.num_warmups):
        outcome = await client.ask(prompts.ask(place, Kind.WARM_UP))
        if outcome.failure is not None:
            raise WarmUpError(f"the warm-up failed: {outcome.failure.kind}: {outcome.failure.message}")


def _print(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    if arguments.json:
        text = indented(report).decode()
    elif arguments.csv:
        text = render_csv(report)
    else:
        text = render_table(report, metrics=arguments.percentile_metrics, percentiles=arguments.metric_percentiles)
    print(text, end="", flush=True)


def _save(arguments: argparse.Namespace, report: dict[str, Any], run: Run) -> None:
    if arguments.save_result.suffix == ".csv":
        arguments.save_result.write_text(render_csv(report), "utf-8")
        return
    rows = {"requests": describe_requests(run.result)} if arguments.save_detailed else {}
    arguments.save_result.write_bytes(indented(report | rows))
