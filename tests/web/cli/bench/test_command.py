"""The command `quipu bench serve`: flags, what goes to which stream and file, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quipu.web.cli.cli import main as quipu
from tests.web.cli.bench.bench_server import BenchServer, Reply, Request, good_reply, serving, text_event

SMALL = ("--num-prompts", "3", "--random-input-len", "5", "--random-output-len", "2")


def quipu_like_reply(request: Request) -> Reply:
    if request.method == "GET":
        known = {"/v1/models": {"data": [{"id": "first"}, {"id": "second"}]}, "/server_info": {"vocab_size": 50}}
        return Reply(200, "application/json", [json.dumps(known[request.path]).encode()])
    return good_reply()


def run(*arguments: str) -> int:
    return quipu(["bench", "serve", *arguments])


def completion_requests(server: BenchServer) -> list[Request]:
    return [request for request in server.requests if request.method == "POST"]


def test_quick(capsys: pytest.CaptureFixture[str]) -> None:
    """`--quick` sends three short requests; later flags override it."""
    with serving(quipu_like_reply) as server:
        assert run("--base-url", server.url, "--json", "--quick", "--random-output-len", "7") == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 3
    assert {len(request.body["prompt"]) for request in completion_requests(server)} == {16}
    assert {request.body["max_tokens"] for request in completion_requests(server)} == {7}


def test_stdout_is_only_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is one JSON object, without progress; model and vocabulary are fetched from the server."""
    with serving(quipu_like_reply) as server:
        assert run("--base-url", server.url + "/v1/", "--json", *SMALL) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert output.err == ""
    assert (report["completed"], report["failed"], report["num_prompts"]) == (3, 0, 3)
    assert (report["total_cached_tokens"], report["cache_hit_rate"], report["usage_available"]) == (96, 0.32, True)
    assert (report["model"], report["request_rate"], report["max_concurrency"]) == ("first", "inf", None)
    for request in completion_requests(server):
        assert request.body["model"] == "first"
        assert request.body["temperature"] == 0
        assert "ignore_eos" not in request.body
        assert len(request.body["prompt"]) == 5
        assert max(request.body["prompt"]) < 50


def test_what_flags_send(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Key, headers, sampling and extra fields are in every request and in no report; nothing given by flags
    is fetched."""
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    flags = ("--model", "m", "--vocab-size", "4096", "--ignore-eos", "--temperature", "0.7", "--disable-tqdm", "--json")
    extra = ("--header", "X-Tenant=a=b", "--extra-body", '{"cache_salt": "pepper"}')
    with serving(quipu_like_reply) as server:
        assert run("--base-url", server.url, *SMALL, *flags, *extra) == 0
        assert run("--base-url", server.url, *SMALL, *flags, *extra, "--api-key", "from-flag") == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert all(secret not in output.out for secret in ("from-env", "from-flag", "a=b", "pepper"))
    assert len(completion_requests(server)) == len(server.requests) == 6
    assert [request.headers["authorization"] for request in server.requests[2:4]] == [
        "Bearer from-env",
        "Bearer from-flag",
    ]
    for request in server.requests:
        assert request.headers["x-tenant"] == "a=b"
        body = request.body
        assert (body["ignore_eos"], body["temperature"], body["cache_salt"]) == (True, 0.7, "pepper")


def test_table_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    """The table is the default; CSV is two lines."""
    with serving(quipu_like_reply) as server:
        assert run("--base-url", server.url, *SMALL, "--percentile-metrics", "ttft", "--metric-percentiles", "75") == 0
        table = capsys.readouterr().out
        assert run("--base-url", server.url, *SMALL, "--csv") == 0
    assert "P75 TTFT" in table
    assert "ITL" not in table
    names, values = capsys.readouterr().out.splitlines()
    assert dict(zip(names.split(","), values.split(","), strict=True))["total_cached_tokens"] == "96"


def test_saved_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has the same JSON as standard output, with a row per request on demand; with the suffix .csv
    it is CSV."""
    with serving(quipu_like_reply) as server:
        saved = tmp_path / "result.json"
        assert run("--base-url", server.url, *SMALL, "--json", "--save-result", str(saved), "--save-detailed") == 0
        result = json.loads(saved.read_text())
        assert [row["cached_tokens"] for row in result.pop("requests")] == [32, 32, 32]
        assert result == json.loads(capsys.readouterr().out)
        saved = tmp_path / "result.csv"
        assert run("--base-url", server.url, *SMALL, "--save-result", str(saved)) == 0
        assert saved.read_text().startswith("date,")
        assert run("--base-url", server.url, *SMALL, "--save-result", str(tmp_path / "none" / "x.json")) == 1
        output = capsys.readouterr()
        assert "--save-result" in output.err
        assert "Completed requests" in output.out, "the results must be printed even if the file cannot be written"


def test_some_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """Failures are counted and listed; if anything completed, the exit code is 0."""
    replies = iter([good_reply(), Reply(503, "application/json", [b'{"error": {"message": "full"}}']), good_reply()])
    with serving(lambda request: next(replies)) as server:
        assert run("--base-url", server.url, "--model", "m", "--vocab-size", "50", "--json", *SMALL) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["completed"], report["failed"]) == (2, 1)
    assert report["errors"] == [{"kind": "http_503", "count": 1, "example": "full"}]


def test_all_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """The report is still printed; the exit code says that nothing was measured."""
    with serving(lambda request: Reply(pieces=[text_event("x")], is_cut=True)) as server:
        assert run("--base-url", server.url, "--model", "m", "--vocab-size", "50", "--json", *SMALL) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["errors"][0]["kind"] == "stream_cut"
    assert "no request completed" in output.err


def test_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Warm-up requests are not reported and not counted; if they fail, there is no run."""
    with serving(quipu_like_reply) as server:
        assert run("--base-url", server.url, *SMALL, "--num-warmups", "2", "--json") == 0
        prompts = [tuple(request.body["prompt"]) for request in completion_requests(server)]
    assert json.loads(capsys.readouterr().out)["completed"] == 3
    assert len(prompts) == len(set(prompts)) == 5
    with serving(lambda request: Reply(500, "text/plain", [b"broken"])) as server:
        assert run("--base-url", server.url, *SMALL, "--model", "m", "--vocab-size", "50", "--num-warmups", "2") == 1
        assert len(server.requests) == 1
    output = capsys.readouterr()
    assert "http_500: broken" in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("reply", "complaint", "flag"),
    [
        (Reply(401, "application/json", [b"{}"]), "401", "--api-key"),
        (Reply(404, "application/json", [b"{}"]), "404", "--model"),
        (Reply(200, "application/json", [b"{}"]), "not a list of models", "--model"),
        (Reply(200, "application/json", [b'{"data": []}']), "lists no model", "--model"),
    ],
)
def test_model_not_found(capsys: pytest.CaptureFixture[str], reply: Reply, complaint: str, flag: str) -> None:
    """The message has the server's response and names the flag that helps."""
    with serving(lambda request: reply) as server:
        assert run("--base-url", server.url, *SMALL) == 1
    output = capsys.readouterr()
    assert complaint in output.err
    assert flag in output.err
    assert output.out == ""


def test_other_server_without_vocabulary() -> None:
    """A server other than quipu gets token ids that every vocabulary has."""

    def answer(request: Request) -> Reply:
        return good_reply() if request.method == "POST" else Reply(404, "text/plain", [b"no"])

    with serving(answer) as server:
        assert run("--base-url", server.url, *SMALL, "--model", "m", "--disable-tqdm") == 0
    assert all(1000 <= id_ < 8000 for request in completion_requests(server) for id_ in request.body["prompt"])


@pytest.mark.parametrize(
    "flags",
    [
        "shared-prefix --shared-prefix-num-prefixes 2 --shared-prefix-prefix-len 9 --shared-prefix-suffix-len 4"
        " --shared-prefix-output-len 3",
        "prefix_repetition --prefix-repetition-num-prefixes 2 --prefix-repetition-prefix-len 9"
        " --prefix-repetition-suffix-len 4 --prefix-repetition-output-len 3",
        "generated-shared-prefix --gsp-num-groups 2 --gsp-system-prompt-len 9 --gsp-question-len 4 --gsp-output-len 3",
    ],
)
def test_names_of_other_benchmarks(flags: str) -> None:
    """Shared prefixes are also available under vLLM's and SGLang's names."""
    with serving(quipu_like_reply) as server:
        common = ("--base-url", server.url, "--num-prompts", "4", "--disable-tqdm", "--max-concurrency", "1")
        assert run(*common, "--dataset-name", *flags.split()) == 0
    prompts = [request.body["prompt"] for request in completion_requests(server)]
    assert [len(prompt) for prompt in prompts] == [13] * 4
    assert prompts[0][:9] == prompts[2][:9] != prompts[1][:9]
    assert {request.body["max_tokens"] for request in completion_requests(server)} == {3}


def test_tools_reach_the_server(tmp_path: Path) -> None:
    """Each request has the tools and the tool choice of its row."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "tools": [tool], "tool_choice": "required"},
        {"messages": [{"role": "user", "content": "b"}]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    flags = ("--endpoint", "/v1/chat/completions", "--dataset-name", "custom", "--dataset-path", str(path))
    with serving(quipu_like_reply) as server:
        assert run("--base-url", server.url, *flags, "--max-concurrency", "1", "--disable-tqdm") == 0
    first, second = (request.body for request in completion_requests(server))
    assert (first["tools"], first["tool_choice"]) == ([tool], "required")
    assert first["messages"] == [{"role": "user", "content": "a"}]
    assert "tools" not in second and "tool_choice" not in second


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--dataset-name", "trace"], "--dataset-path"),
        (["--dataset-path", "x"], "reads no file"),
        (["--dataset-name", "custom", "--dataset-path", "/none/rows.jsonl"], "/none/rows.jsonl: No such file"),
        (["--endpoint", "/v1/chat/completions", "--prompt-format", "ids"], "takes text only"),
        (["--dataset-name", "multi-turn", "--prompt-format", "ids"], "multi-turn prompts must be text"),
        (["--save-detailed"], "--save-result"),
    ],
)
def test_conflicting_flags(capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str) -> None:
    """Conflicting flags are refused before any request is sent."""
    assert run("--base-url", "http://127.0.0.1:9", *flags) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--base-url", "127.0.0.1:8000"),
        ("--base-url", "http://user:secret@host"),
        ("--endpoint", "/generate"),
        ("--request-rate", "0"),
        ("--request-rate", "nan"),
        ("--burstiness", "-1"),
        ("--max-concurrency", "0"),
        ("--num-prompts", "many"),
        ("--random-range-ratio", "1"),
        ("--trace-speed", "inf"),
        ("--header", "X-Tenant"),
        ("--api-key", "schlüssel"),
        ("--extra-body", "[]"),
        ("--extra-body", "{"),
        ("--percentile-metrics", "ttft,speed"),
        ("--metric-percentiles", "101"),
    ],
)
def test_invalid_flags(capsys: pytest.CaptureFixture[str], flag: str, value: str) -> None:
    """The error names the flag."""
    with pytest.raises(SystemExit) as ended:
        run(f"{flag}={value}")
    assert ended.value.code == 2
    assert f"argument {flag}" in capsys.readouterr().err


def test_serving_loads_no_benchmark() -> None:
    """`quipu serve` imports neither the benchmark nor its HTTP client."""
    code = (
        "import sys, quipu.web.cli.cli as cli; cli.make_parser().parse_args(['serve']);"
        "sys.exit(any(name.startswith(('quipu.web.cli.bench', 'httpx2', 'tqdm')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
