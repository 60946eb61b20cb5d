"""Usage reports of real servers, read with the official client and plain HTTP, match the usage in responses.

Tenants with keys send requests over every API, streamed and not. Then an admin reads the reports while the server runs,
after it was stopped, after it was killed, and from the command line without a server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from tests.e2e.prompts import text_prompt, token_prompt
from tests.e2e.servers import PATIENCE_S, Server, eventually, run_quipu, serving, write_keys
from tests.postgres import Postgres

KEYS = {"acme": "sk-quipu-of-acme", "bolt": "sk-quipu-of-bolt", "ops": "sk-quipu-of-ops"}
FAKE = ("--executor", "fake", "--fake-step-seconds", "0.001")
MINUTE = 60


@attrs.define
class Totals:
    """Usage summed over the responses to one tenant."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    written: int = 0
    created_5m: int = 0
    output: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(a + b for a, b in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


def extra() -> dict[str, Any]:
    return {"temperature": 0, "ignore_eos": True}


def from_openai(usage: Any) -> Totals:
    details = usage.prompt_tokens_details.model_dump()
    written = details["cache_write_tokens"]
    return Totals(1, usage.prompt_tokens, details["cached_tokens"], written, 0, usage.completion_tokens)


def from_anthropic(usage: Any, written: int) -> Totals:
    created = usage.cache_creation_input_tokens
    prompt = usage.input_tokens + usage.cache_read_input_tokens + created
    return Totals(1, prompt, usage.cache_read_input_tokens, written, created, usage.output_tokens)


@attrs.define
class Tenant:
    """Sends requests over all APIs with its own key."""

    server: Server
    name: str
    totals: Totals = attrs.field(factory=Totals)
    request_ids: list[str] = attrs.field(factory=list)

    def ask_openai(self, prompt: Any) -> None:
        with self.server.client(KEYS[self.name]) as client:
            fields: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": 5, "extra_body": extra()}
            raw = client.completions.with_raw_response.create(**fields)
            self.request_ids.append(raw.headers["X-Quipu-Request-Id"])
            self.totals += from_openai(raw.parse().usage)
            chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
            self.totals += from_openai(chunks[-1].usage)
            chat: dict[str, Any] = {"model": "demo", "max_tokens": 4, "extra_body": extra()}
            chat["messages"] = [{"role": "user", "content": text_prompt("chat", 50)}]
            self.totals += from_openai(client.chat.completions.create(**chat).usage)
            answer = client.responses.create(model="demo", input=text_prompt("response", 40), max_output_tokens=3)
            usage = answer.usage
            assert usage is not None
            details = usage.input_tokens_details.model_dump()
            self.totals += Totals(
                1,
                usage.input_tokens,
                details["cached_tokens"],
                details["cache_write_tokens"],
                0,
                usage.output_tokens,
            )

    def ask_anthropic(self, tag: str) -> None:
        """Send a marked prefix, plain and streamed. Only the record has the tokens written after the mark."""
        with self.server.anthropic_client(KEYS[self.name]) as client:
            system = [{"type": "text", "text": text_prompt(tag, 60), "cache_control": {"type": "ephemeral"}}]
            fields: dict[str, Any] = {"model": "demo", "max_tokens": 6, "system": system, "extra_body": extra()}
            fields["messages"] = [{"role": "user", "content": "What is tied into a quipu?"}]
            raw = client.messages.with_raw_response.create(**fields)
            request_id = raw.headers["X-Quipu-Request-Id"]
            self.request_ids.append(request_id)
            self.totals += from_anthropic(raw.parse().usage, self.record(request_id)["cache_write_tokens"])
            with client.messages.stream(**fields) as stream:
                usage = stream.get_final_message().usage
                request_id = stream.response.headers["X-Quipu-Request-Id"]
            self.totals += from_anthropic(usage, self.record(request_id)["cache_write_tokens"])

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.server.url + path, headers={"x-api-key": KEYS[self.name]}, timeout=PATIENCE_S)

    def record(self, request_id: str) -> Any:
        answer = self.get(f"/v1/usage/{request_id}")
        assert answer.status_code == 200, answer.text
        return answer.json()


def openai_report(server: Server, **parameters: Any) -> dict[str | None, Totals]:
    """Read all pages by project with the official client."""
    found: dict[str | None, Totals] = {}
    parameters = {"start_time": int(time.time()) - 15 * MINUTE, "bucket_width": "1m", "limit": 7, **parameters}
    with server.client(KEYS["ops"]) as client:
        while True:
            page = client.admin.organization.usage.completions(group_by=["project_id", "model"], **parameters)
            assert len(page.data) <= 7
            for result in (result for bucket in page.data for result in bucket.results):
                assert result.object == "organization.usage.completions.result" and result.model == "demo"
                totals = Totals(
                    result.num_model_requests,
                    result.input_tokens,
                    result.input_cached_tokens or 0,
                    result.input_cache_write_tokens or 0,
                    0,
                    result.output_tokens,
                )
                found[result.project_id] = found.get(result.project_id, Totals()) + totals
            if not page.has_more:
                return found
            assert page.next_page is not None
            parameters["page"] = page.next_page


def anthropic_report(server: Server) -> dict[str, Totals]:
    """Read all pages by workspace over plain HTTP. The report lacks requests and tokens written after a mark."""
    found: dict[str, Totals] = {}
    start = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 15 * MINUTE))
    pairs = [("starting_at", start), ("bucket_width", "1m"), ("limit", "9"), ("group_by[]", "workspace_id")]
    headers = {"x-api-key": KEYS["ops"], "anthropic-version": "2023-06-01"}
    cursor: list[tuple[str, str]] = []
    while True:
        path = f"{server.url}/v1/organizations/usage_report/messages"
        answer = httpx.get(path, params=[*pairs, *cursor], headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        for result in (result for bucket in page["data"] for result in bucket["results"]):
            created = result["cache_creation"]["ephemeral_5m_input_tokens"]
            cached = result["cache_read_input_tokens"]
            prompt = result["uncached_input_tokens"] + cached + created
            totals = Totals(0, prompt, cached, 0, created, result["output_tokens"])
            found[result["workspace_id"]] = found.get(result["workspace_id"], Totals()) + totals
        if not page["has_more"]:
            return found
        cursor = [("page", page["next_page"])]


def command_report(folder: Path, *flags: str, **environment: str) -> dict[str, Totals]:
    """Read the report by tenant with `quipu usage`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        done = run_quipu("usage", "--since", "1h", "--by", "tenant,model", "--json", *flags, folder=folder)
    assert done.returncode == 0, done.stderr
    names = ("num_requests", "prompt_tokens", "cached_tokens", "cache_write_tokens", "created_5m_tokens")
    rows = json.loads(done.stdout)["rows"]
    return {row["tenant"]: Totals(*(row[name] for name in (*names, "completion_tokens"))) for row in rows}


def check_reports(server: Server, folder: Path, expected: dict[str, Totals]) -> None:
    """Assert that every report equals the sums of the responses."""
    assert openai_report(server) == {name: attrs.evolve(one, created_5m=0) for name, one in expected.items()}
    assert anthropic_report(server) == {
        name: attrs.evolve(one, requests=0, written=0) for name, one in expected.items()
    }
    assert command_report(folder) == expected


@pytest.fixture
def ask_all(tmp_path: Path) -> Iterator[Callable[[Server, dict[str, Totals]], list[Tenant]]]:
    """Make two tenants send the same requests over every API, streamed and not."""
    write_keys(tmp_path.with_name("keys.json"), **KEYS)

    def ask(server: Server, expected: dict[str, Totals]) -> list[Tenant]:
        tenants = [Tenant(server, name) for name in ("acme", "bolt")]
        for tenant in tenants:
            tenant.ask_openai(token_prompt("the same", 70))
            tenant.ask_anthropic("marked")
            expected[tenant.name] = expected.get(tenant.name, Totals()) + tenant.totals
        return tenants

    yield ask


def test_reports_match_responses(tmp_path: Path, ask_all: Callable[[Server, dict[str, Totals]], list[Tenant]]) -> None:
    """Reports match for each tenant while the server runs, is stopped, is killed, and is started again."""
    flags = (*FAKE, "--key-file", str(tmp_path.with_name("keys.json")))
    expected: dict[str, Totals] = {}
    with serving(tmp_path, *flags) as server:
        acme, bolt = ask_all(server, expected)
        assert expected["acme"] == expected["bolt"] and expected["acme"].requests == 6
        assert expected["acme"].cached > 0 and expected["acme"].created_5m > 0
        check_reports(server, tmp_path, expected)
        assert_visibility(acme, bolt)
        assert openai_report(server, project_ids=["bolt"]) == {"bolt": attrs.evolve(expected["bolt"], created_5m=0)}
        assert openai_report(server, api_key_ids=["id-acme"]).keys() == {"acme"}
        assert openai_report(server, models=["other"]) == {}
    assert command_report(tmp_path) == expected, "the server is down"
    with serving(tmp_path, *flags) as server:
        assert openai_report(server).keys() == expected.keys(), "requests from before the restart"
        ask_all(server, expected)
        check_reports(server, tmp_path, expected)
        server.process.kill()
        server.process.wait()
    assert command_report(tmp_path) == expected, "the server was killed"
    with serving(tmp_path, *flags) as server:
        assert anthropic_report(server) == {n: attrs.evolve(one, requests=0, written=0) for n, one in expected.items()}


def assert_visibility(acme: Tenant, bolt: Tenant) -> None:
    """A tenant sees only its own records, and not that another tenant had cached its prompt; reports are for admins."""
    (same, _), (other, _) = acme.request_ids, bolt.request_ids
    assert acme.record(same)["tenant"] == "acme" and acme.get(f"/v1/usage/{other}").status_code == 404
    ops = Tenant(bolt.server, "ops")
    assert (bolt.record(other)["miss_reason"], ops.record(other)["miss_reason"]) == ("diverged", "other_domain")
    now = int(time.time())
    for path in (
        f"/v1/organization/usage/completions?start_time={now - MINUTE}",
        "/v1/organizations/usage_report/messages?starting_at=2026-01-01T00:00:00Z",
    ):
        assert [one.get(path).status_code for one in (acme, ops)] == [403, 200]
        assert httpx.get(bolt.server.url + path, timeout=PATIENCE_S).status_code == 401


def test_retries_and_disconnects(tmp_path: Path) -> None:
    """Requests with the same idempotency key count separately, or once if collapsed; an abandoned request counts the
    work done."""
    with serving(tmp_path, *FAKE) as server:
        since = int(time.time()) - MINUTE
        body = {"model": "demo", "prompt": token_prompt("twice", 40), "max_tokens": 5, **extra()}
        for _ in range(3):
            assert server.post("/v1/completions", body, headers={"Idempotency-Key": "one"}).status_code == 200
        report = f"/v1/organization/usage/completions?start_time={since}&bucket_width=1d"

        def total(flags: str = "") -> Totals:
            results = [result for bucket in server.get(report + flags).json()["data"] for result in bucket["results"]]
            names = ("num_model_requests", "input_tokens", "input_cached_tokens", "input_cache_write_tokens")
            return sum(
                (Totals(*[*(result[name] for name in names), 0, result["output_tokens"]]) for result in results),
                Totals(),
            )

        assert total() == Totals(3, 120, 64, 32, 0, 15)
        assert total("&retries=collapse") == Totals(1, 40, 0, 32, 0, 5)
        assert command_report(tmp_path)["default"] == total()
        assert command_report(tmp_path, "--retries", "collapse")["default"] == total("&retries=collapse")
        long = body | {"prompt": token_prompt("leaves", 40), "max_tokens": 4000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=PATIENCE_S) as response:
            next(response.iter_lines())
            request_id = response.headers["X-Quipu-Request-Id"]
        record: Any = eventually(
            lambda: answer.json() if (answer := server.get(f"/v1/usage/{request_id}")).status_code == 200 else None,
            "the request has a record",
        )
        assert record["outcome"] == "cancelled" and 0 < record["completion_tokens"] < 4000
        assert total() == Totals(4, 160, 64, 64, 0, 15 + record["completion_tokens"])


def test_database_away(tmp_path: Path, postgres: Postgres) -> None:
    """While PostgreSQL is down reports are 503 and requests are served; when it is back, the report is complete."""
    url = postgres.new_database()
    with serving(tmp_path, *FAKE, "--ledger-url", url) as server:
        report = f"/v1/organization/usage/completions?start_time={int(time.time()) - MINUTE}"
        record = f"/v1/usage/{server.complete(token_prompt('before', 40)).headers['X-Quipu-Request-Id']}"
        assert server.get(record).json()["prompt_tokens"] == 40
        postgres.stop()
        try:
            assert server.complete(token_prompt("meanwhile", 40)).status_code == 200
            for path in (report, record):
                response = server.get(path)
                assert (response.status_code, response.json()["error"]["code"]) == (503, "ledger_unavailable")
                assert "Retry-After" in response.headers
            anthropic_error = server.get("/v1/organizations/usage_report/messages?starting_at=2026-01-01T00:00:00Z")
            assert (anthropic_error.status_code, anthropic_error.json()["error"]["type"]) == (529, "overloaded_error")
        finally:
            postgres.start()

        def num_requests() -> int:
            answer = server.get(report).json()
            return sum(r["num_model_requests"] for b in answer.get("data", ()) for r in b["results"])

        eventually(lambda: num_requests() == 2, "both requests are in the report")
    assert command_report(tmp_path, "--ledger-url", url)["default"].requests == 2
    assert command_report(tmp_path, QUIPU_LEDGER_URL=url)["default"].prompt == 80
