"""The command `quipu audit`: flags, what goes to which stream and file, exit codes, and that no key is printed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from quipu.web.cli.audit.drawn_prompts import draw_prompt
from quipu.web.cli.audit.exchange import Ask
from quipu.web.cli.audit.request_body import Target, body_of, curl_of
from quipu.web.cli.cli import main as quipu
from tests.web.cli.bench.bench_server import DONE, Reply, Request, chat_event, serving, usage_event

SMALL = ("--api", "chat,responses", "--prompt-tokens", "120", "--timeout", "20")


class Counting:
    """Answers chats: a word is a token, and blocks have 16. `factor` multiplies what is cached."""

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor
        self.seen: list[list[str]] = []

    def __call__(self, request: Request) -> Reply:
        if request.method == "GET":
            return Reply(200, "application/json", [b'{"data": [{"id": "model $(touch was-run) \\u001b[2J<b>"}]}'])
        if request.path != "/v1/chat/completions" or request.body.get("temperature", 0) < 0:
            return Reply(404, "application/json", [b"{}"])
        words = ["<user>", *request.body["messages"][0]["content"].split(), "<end>"]
        common = max((len(list(takewhile(bool, map(str.__eq__, old, words)))) for old in self.seen), default=0)
        cached = min(common, len(words) - 1) // 16 * 16 * self.factor
        self.seen.append(words)
        if request.body.get("stream"):
            usage_chunk = usage_event(len(words), 1, cached_tokens=cached)
            return Reply(pieces=[chat_event({"content": "x"}, "stop"), usage_chunk, DONE])
        usage = {"prompt_tokens": len(words), "prompt_tokens_details": {"cached_tokens": cached}}
        body = {"choices": [{"index": 0}], "usage": usage}
        return Reply(200, "application/json", [json.dumps(body).encode()])


def run(*arguments: str) -> int:
    return quipu(["audit", *arguments])


def test_table_of_a_truthful_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Standard output has the table and nothing else, standard error nothing; the exit code is 0. The page has no key,
    loads nothing, and shows what the server said as text."""
    page = tmp_path / "audit.html"
    with serving(Counting()) as server:
        assert (
            run(server.url + "/v1", *SMALL, "--html", str(page), "--key", "s3cret", "--header", "X-Tenant=t3nant") == 0
        )
        assert server.num_open == 0
        assert {request.headers["authorization"] for request in server.requests} == {"Bearer s3cret"}
        assert {request.headers["x-tenant"] for request in server.requests} == {"t3nant"}
    output = capsys.readouterr()
    assert output.err == ""
    lines = output.out.splitlines()
    assert lines[0].startswith("model $(touch was-run) ?[2J<b> at http://127.0.0.1:")
    assert ["cold", "true", "true"] in [line.split() for line in lines]
    assert ["reported", "true", "true", "-", "-"] in [line.split() for line in lines]
    text = page.read_text()
    for shown in (output.out, text):
        assert "s3cret" not in shown and "t3nant" not in shown
    assert "&lt;b&gt;" in text and "<b> at" not in text
    assert not any(word in text for word in ("<script", 'http-equiv="refresh', "<img", "<link", "url(", "@import"))


def test_false_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A lie makes the exit code 1, and the report shows it as curl commands that send the same bodies."""
    server_side = Counting(factor=2)
    with serving(server_side) as server:
        assert run(server.url, *SMALL, "--json", "--api", "chat", "--key", "s3cret") == 1
        sent = [request.body for request in server.requests if request.method == "POST"]
    report = json.loads(capsys.readouterr().out)
    false = [finding for finding in report["findings"] if finding["verdict"] == "false"]
    assert {"counts", "prefix"} <= {finding["check"] for finding in false}
    assert report["verdicts"]["false"] == len(false) and report["quipu_audit"] == 1
    for finding in false:
        for curl in finding["curl"]:
            assert "s3cret" not in curl and '"Authorization: Bearer $KEY"' in curl
            assert len(curl) < 700
            assert shell_body(curl, tmp_path) in sent


def shell_body(curl: str, folder: Path) -> Any:
    """Return the body that a shell would send."""
    script = f'KEY=k; curl() {{ [ "$#" -gt 3 ] && cat; }}\n{curl}\n'
    done = subprocess.run(["bash", "-u", "-c", script], cwd=folder, capture_output=True, check=True, text=True)
    assert done.stderr == "" and not list(folder.iterdir())
    return json.loads(done.stdout)


def test_model_named_like_a_placeholder(tmp_path: Path) -> None:
    """No name of a model gets in the way of the prompt in a curl command, nor is it run by the shell."""
    prompt = draw_prompt(20, random.Random(1))
    for model in ("@0@", "-0", '"', "`touch was-run`", "\\", "END\nEND", "${KEY}"):
        for ask in (Ask("chat", (prompt,)), Ask("completions", (prompt, prompt.grown(9)))):
            target = Target("http://127.0.0.1:1", model, takes_ids=True)
            assert shell_body(curl_of(ask, target), tmp_path) == json.loads(body_of(ask, target))


def test_comparison(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Saved reports stand beside each other; what is no report is refused, and named."""
    files = []
    for name, factor in (("honest", 1), ("double", 2)):
        with serving(Counting(factor)) as server:
            assert run(server.url, *SMALL, "--json", "--api", "chat") == factor - 1
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(capsys.readouterr().out)
    assert run("--compare", *map(str, files)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["counts", "true", "FALSE"] in rows and ["cold", "true", "true"] in rows
    assert run("--compare", *map(str, files), "--json") == 0
    first, second = json.loads(capsys.readouterr().out)["audits"]
    assert (first["verdicts"]["prefix"], second["verdicts"]["prefix"]) == ("true", "false")
    odd = tmp_path / "odd.json"
    for content in ("[]", "{", '{"quipu_audit": 9, "date": "", "url": "", "model": "", "findings": []}', "[" * 10**5):
        odd.write_text(content)
        assert run("--compare", str(files[0]), str(odd)) == 2
        assert "odd.json is" in capsys.readouterr().err
    assert run("--compare", str(tmp_path / "none.json")) == 2
    assert "cannot read" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that is not there, or answers nothing, is no verdict: exit code 2, one line."""
    assert run("http://127.0.0.1:1") == 2
    assert capsys.readouterr().err.count("\n") == 1
    with serving(lambda request: Reply(401, "application/json", [b"{}"])) as server:
        assert run(server.url) == 2
        assert "give --key" in capsys.readouterr().err
        assert run(server.url, "--model", "m") == 2
        assert "chat: no answer to a short prompt: http_401" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "give the URL"),
        (["ftp://x"], "not an http or https address"),
        (["http://user:s3cret@x"], "give keys with --key"),
        (["http://x", "--api", "chat,music"], "unknown API 'music'"),
        (["http://x", "--budget", "-1"], "not a whole number above 0"),
        (["http://x", "--timeout", "nan"], "not a number of seconds"),
        (["http://x", "--prompt-tokens", "20001"], "more than 20000"),
        (["http://x", "--header", "a b=c"], "not K=V"),
        (["http://x", "--bugdet", "5"], "did you mean --budget?"),
    ],
)
def test_invalid_flags(capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str) -> None:
    """The error is one line, names the flag, and repeats no key."""
    with pytest.raises(SystemExit) as ended:
        run(*flags)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert complaint in error and "s3cret" not in error and error.count("\n") == 1


def test_help_lists_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`quipu --help` says what the command is for, and its own help has every flag."""
    for arguments, shown in ((["--help"], "audit"), (["audit", "--help"], "--other-key")):
        with pytest.raises(SystemExit) as ended:
            quipu(arguments)
        assert ended.value.code == 0
        assert shown in capsys.readouterr().out


def test_audit_loads_no_engine() -> None:
    """The command's modules import neither torch nor anything of the kernels, and of the actors only what is known of
    terminals and of groups of errors."""
    code = (
        "import sys, quipu.web.cli.audit.audit_command;"
        "known = {'quipu.actors', 'quipu.actors.shared'};"
        "known |= {f'quipu.actors.shared.{name}' for name in ('error_groups', 'terminals')};"
        "sys.exit(any(name.startswith(('torch', 'quipu.actors', 'quipu.kernels', 'numpy')) for name in sys.modules"
        " if name not in known))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
