"""Requests that schemathesis draws from the OpenAPI document, sent to the app: `make test-openapi`.

Half of them are meant to be allowed by the document and half to be forbidden; a validator decides which they are. What
must hold: nothing is a 5xx, nothing that the document forbids is served, and every answer is as the document says.

They are sent to a runtime on the fake executor, whose sequences are short; those that add and remove engines to a fake
desk, where that costs nothing. Half of those about a batch are about one that exists.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import attrs
import requests
import schemathesis
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from bench.stored_bodies import STORED_BODIES
from quipu.actors.config.declarations import COMPLETIONS, GENERATE, RESPONSES
from quipu.actors.response_store.response_store import StoreConfig, open_store
from quipu.kernels.fake import Dials
from quipu.web.api.openapi.document import make_document
from quipu.web.options import AppOptions
from tests.grammars import EOS
from tests.kept_forks import kept_forks
from tests.runtimes import BLOCK, small_runtime
from tests.web.api.openapi.full_apps import full_app, idle_batches
from tests.web.api.openapi.promises import Answer, Promises
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
IN_TIME_S = 60.0
MOST_TOKENS = 8
VOCABULARY = 4096
GENERATE_LIMITS = ("max_new_tokens", "min_new_tokens", "n_predict")
HEAVY = 12
"""How many times more cases a route has that generates, compared with one that only shows something."""
BATCHES, MESSAGE_BATCHES, FILES = "/v1/batches", "/v1/messages/batches", "/v1/files"
CHANGES_ENGINES = "/v1/admin"
"""Where engines are added and removed."""


def tame(body: dict[str, Any]) -> None:
    """Name a model that is served, and ask for few tokens: otherwise nearly every answer would be a 404 or a 400."""
    if isinstance(body.get("model"), str):
        body["model"] = "demo"
    for name in ("prompt", "input_ids"):
        if name in body:
            body[name] = tamed(body[name])
    if isinstance(body.get("sampling_params"), dict):
        tame(body["sampling_params"])
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", *GENERATE_LIMITS):
        if isinstance(body.get(name), int) and body[name] > MOST_TOKENS:
            body[name] = MOST_TOKENS


def tamed(prompt: Any) -> Any:
    """Return a prompt of the same kind with tokens that the vocabulary has, and with at least one."""
    if isinstance(prompt, list):
        return [tamed(part) for part in prompt]
    if isinstance(prompt, int | float) and not isinstance(prompt, bool) and prompt >= 0 and prompt == prompt // 1:
        return int(prompt % VOCABULARY)
    return prompt or "x" if isinstance(prompt, str) else prompt


@attrs.define
class Report:
    num_cases: int = 0
    num_allowed: int = 0
    num_served: int = 0
    """Of those that the document allows."""
    statuses: collections.Counter[int] = attrs.field(factory=collections.Counter)
    broken: dict[str, str] = attrs.field(factory=dict)
    """What does not hold, each with a request that shows it."""
    served_at: collections.Counter[str] = attrs.field(factory=collections.Counter)
    refused: collections.Counter[str] = attrs.field(factory=collections.Counter)
    """Why requests that the document allows were refused."""


@attrs.frozen
class Known:
    """What exists before requests are drawn."""

    file_id: str
    batch_ids: Mapping[str, str]
    """By the path of its API."""

    @classmethod
    async def make(cls, client: Client) -> Known:
        """Upload a file and start a batch of each API."""
        first = STORED_BODIES[BATCHES].made
        assert first is not None
        _, file = await client.post(FILES, first.body, first.headers)
        body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        _, batch = await client.post(BATCHES, body)
        params = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi."}]}
        _, messages = await client.post(MESSAGE_BATCHES, {"requests": [{"custom_id": "a", "params": params}]})
        return cls(file["id"], {BATCHES: batch["id"], MESSAGE_BATCHES: messages["id"]})

    def put_into(self, case: Any) -> None:
        """Have a request be about it, if it is about a file or a batch."""
        for path, batch_id in self.batch_ids.items():
            if case.path.startswith(f"{path}/"):
                case.path_parameters["batch_id"] = batch_id
        if case.path.startswith(f"{FILES}/"):
            case.path_parameters["file_id"] = self.file_id
        if isinstance(case.body, dict) and isinstance(case.body.get("input_file_id"), str):
            case.body["input_file_id"] = self.file_id
            if isinstance(case.body.get("endpoint"), str):
                case.body["endpoint"] = COMPLETIONS


@attrs.frozen
class Sender:
    """Sends drawn requests, from the thread that draws them."""

    promises: Promises
    report: Report
    client: Client
    known: Known

    def send(self, case: Any) -> None:
        if self.report.num_cases % 2 and case.method != "DELETE":
            self.known.put_into(case)
        if isinstance(case.body, dict):
            if case.path.startswith(RESPONSES):
                case.body.setdefault("input", "x")  # which only stored conversations can do without
            if case.path == GENERATE and not case.body.get("input_ids"):
                case.body["text"] = case.body.get("text") or "x"
            tame(case.body)
            if isinstance(case.body.get("body"), dict):
                tame(case.body["body"])
        sent = requests.Request(**case.as_transport_kwargs(base_url="http://test")).prepare()
        data = sent.body.encode() if isinstance(sent.body, str) else sent.body or b""
        answer = trio.from_thread.run(self._exchange, case.method, sent.path_url, data)
        self._judge(case, sent.path_url, data, answer)

    async def _exchange(self, method: str, path: str, data: bytes) -> Answer:
        with trio.fail_after(IN_TIME_S):
            async with self.client.open(method, path, data) as exchange:
                status = await exchange.wait_started()
                return Answer(status, exchange.headers.get("content-type", ""), await exchange.read())

    def _judge(self, case: Any, path_url: str, data: bytes, answer: Answer) -> None:
        report, method, path = self.report, case.method, case.path
        allowed = self.promises.allows(method, path, path_url.partition("?")[2], data)
        is_served = answer.status < HTTPStatus.BAD_REQUEST
        report.num_cases += 1
        report.num_allowed += allowed
        report.num_served += allowed and is_served
        report.statuses[answer.status] += 1
        report.served_at[f"{method} {path}"] += allowed and is_served
        if allowed and answer.status == HTTPStatus.BAD_REQUEST:
            report.refused[f"{method} {path}: {json.loads(answer.body)['error']['message'][:100]}"] += 1
        found = []
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            found.append(f"{answer.status}")
        if is_served and not allowed:
            found.append("served, although the document forbids it")
        found += self.promises.broken_by(method, path, answer)
        for problem in found:
            told = f"{path_url[:200]} {data[:1500].decode(errors='replace')} -> {answer.body[:400]!r}"
            key = f"{method} {path}: {problem}"
            if len(told) < len(report.broken.get(key, told + " ")):
                report.broken[key] = told


def draw(operation: Any, mode: GenerationMode, num_cases: int, seed: int, send: Callable[[Any], None]) -> None:
    """Draw the cases of one operation, and send each."""

    @seeded(seed)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def draw_case(case: Any) -> None:
        send(case)

    with contextlib.suppress(Unsatisfiable):  # if no request to this route is forbidden
        draw_case()


async def run(num_cases: int, seed: int = 0, only: str = "") -> Report:
    """Send about this many requests, to the routes whose path contains `only`."""
    report = Report()
    engine = {
        "max_model_len": 16 * BLOCK,
        "max_num_batched_tokens": 2048,
        "eos_token_ids": (EOS,),
        "tool_call_parser": "hermes",
    }
    with kept_forks(), tempfile.TemporaryDirectory() as folder:
        kept = StoreConfig(data_dir=Path(folder), ttl_s=3600.0)
        async with (
            open_store(kept) as store,
            small_runtime(Dials(step_seconds=0.0), encode_apart=True, **engine) as runtime,
        ):
            options = AppOptions(domain="tenant", heartbeat_s=math.inf, open_admin=True, allow_client_priority=True)
            desks, batches = (runtime.runtime.desk, FakeDesk()), idle_batches()
            apps = [full_app(None, desk, options, Path(folder), store, batches) for desk in desks]
            document = json.loads(json.dumps(make_document(apps[0])))
            promises = Promises(document)
            async with batches.serving(apps[0]):
                known = await Known.make(Client(apps[0]))
                senders = [Sender(promises, report, Client(one), known) for one in apps]
                await trio.to_thread.run_sync(_draw_all, document, num_cases, seed, only, senders)
    return report


def _draw_all(document: Any, num_cases: int, seed: int, only: str, senders: list[Sender]) -> None:
    schema = schemathesis.openapi.from_dict(document)
    operations = [operation.ok() for operation in schema.get_all_operations()]
    weights = [
        (operation, HEAVY if "requestBody" in operation.definition.raw and is_prompt(operation) else 1)
        for operation in operations
        if only in operation.path
    ]
    share = num_cases / (len(MODES) * sum(weight for _, weight in weights))
    for operation, weight in weights:
        for mode in MODES:
            sender = senders[0 if on_engines(operation) else 1]
            draw(operation, mode, max(1, round(share * weight)), seed, sender.send)


def is_prompt(operation: Any) -> bool:
    """Return whether an operation reads prompts."""
    return operation.definition.raw["tags"][0] in ("Generation", "Cache")


def on_engines(operation: Any) -> bool:
    """Return whether an operation's requests are sent to the runtime."""
    return not operation.path.startswith(CHANGES_ENGINES)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.web.api.openapi.schemathesis_cases", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="of paths that contain this")
    parser.add_argument("--reasons", type=int, default=10, help="to show for refusals")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    report = trio.run(run, arguments.cases, arguments.seed, arguments.only)
    print(
        f"{report.num_cases} requests, {report.num_allowed} of them allowed, of which {report.num_served} were served"
    )
    print(f"statuses: {dict(sorted(report.statuses.items()))}")
    print(*(f"{route}: {number}" for route, number in report.served_at.items()), sep="\n")
    print("the most frequent reasons for refusing what is allowed:")
    print(*(f"{number:5} {why}" for why, number in report.refused.most_common(arguments.reasons)), sep="\n")
    for problem, request in report.broken.items():
        print(f"\nBROKEN {problem}\n    {request}")
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
