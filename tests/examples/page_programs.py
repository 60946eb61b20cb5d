"""What the programs in the documents' shell blocks do in the tests: sent to a server, run, parsed, or not run.

`Programs.answer` has one method for each. What only parses its arguments costs nothing; what is sent or run must
succeed. A server is not started: its flags, files and settings are read. `NOT_RUN` says why the others are not run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import resource
import secrets
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import httpx
import jsonschema

from quipu.web.cli.cli import main as quipu
from tests.e2e.servers import Server, run_quipu
from tests.processes import eventually
from tests.tiny import TINY

from .page_blocks import ROOT
from .page_commands import ELSEWHERE, batches_on, lightened, resolve_server
from .page_make import check_repository_has, quipu_in, would_run
from .page_parsing import NotAsDocumentedError, check_flags_exist, parse, parse_module, spelled_out
from .page_shell import Call, Done
from .shown_audit import save_audits
from .shown_output import rows_of_doctor

NOT_RUN: Mapping[str, str] = {
    "claude": "Claude Code, an npm package: `make agents` drives it",
    "codex": "Codex CLI, an npm package: `make agents` drives it",
    "docker": "there is no Docker: tests/deploy reads the Dockerfile and the Compose file",
    "helm": "it is in no registry: `make test-deploy` renders the chart",
    "kubectl": "there is no cluster",
    "pip": "it downloads gigabytes: `make test-installs` installs",
    "uv": "it downloads gigabytes",
    "uvx": "it downloads gigabytes",
    "pipx": "it downloads gigabytes",
    "prometheus": "`make test-deploy` runs it",
    "openssl": "only its random numbers are needed",
    "systemctl": "there is no systemd",
    "journalctl": "there is no systemd",
    "vllm": "3 GB; `make test-vllm` has it",
    "apt-get": "it changes the machine",
    "jq": "it is not installed, and formats what a page does not show",
}
"""Programs that are not run, and why. Files among their arguments must exist."""
MODULES_NOT_RUN: Mapping[str, str] = {
    "quipu.kernels.demo.train": "it trains for an hour",
    "quipu.kernels.demo.train_adapter": "it trains for minutes",
    "tests.simulation.scale": "minutes: tests/simulation runs smaller ones",
}
"""Modules whose flags are parsed, and why they are not run."""
RUN = {"chat", "completion", "explain", "keys", "ledger", "models", "usage"}
"""Commands that are run as they are. Those in `page_commands.py` are run with less to do; servers are not started."""
_SMALL = ("--quick", "--num-blocks", "64", "--disable-tqdm")
FORKED: Mapping[tuple[str, ...], tuple[str, ...]] = {("bench", "latency"): _SMALL, ("bench", "throughput"): _SMALL}
"""Commands that start an engine, with the flags that make them short."""
OTHERS = ("curl", "make", "python", "python3", "quipu")
FOREIGN_MODELS = re.compile(r"^[A-Z]\w*/")
"""Models of the hub. What is asked of one is checked against the OpenAPI document, and not sent."""
LACKING = {"suffix": "the demo model has no tokens for gaps in a text"}
"""Fields that the demo model cannot serve: checked against the OpenAPI document, and not sent."""
_REQUEST_ID = re.compile(r"\breq-(?:\.\.\.|…|[0-9a-f]{24})")
SERVED = ("http://127.0.0.1:8000", "http://localhost:8000")


@attrs.define(eq=False)
class Programs:
    """Answers the programs of a page's blocks."""

    server: Server
    document: Mapping[str, Any]
    bin: Path
    """The folder of the programs."""
    answers: list[Any] = attrs.field(factory=list)
    """What the server has answered on this page."""
    request_ids: list[str] = attrs.field(factory=list)
    has_made_request: bool = False
    """Whether a page asks about a request that is not on it, so that one was sent."""

    def answer(self, call: Call) -> Done:
        """Answer one program. Failures are for the block's reader: an exit code, and what is wrong."""
        name, *arguments = call.argv
        try:
            match name:
                case "curl":
                    return self.curl(arguments, call.cwd)
                case "quipu":
                    return self.quipu(arguments, call)
                case "make":
                    return self.make(arguments, call)
                case "python" | "python3":
                    return self.python(arguments, call.cwd)
                case "openssl":
                    return Done(secrets.token_hex(32) + "\n")
                case _:
                    return self.not_run(arguments)
        except NotAsDocumentedError as error:
            return Done(stderr=f"{shlex.join(call.argv)}: {error}\n", code=1)

    # ------------------------------------------------------------ curl

    def curl(self, argv: Sequence[str], cwd: Path) -> Done:
        """Send the request, after its body was checked against the OpenAPI document."""
        parser = argparse.ArgumentParser()
        for flags in (("-s", "--silent"), ("-g", "--globoff"), ("-N", "--no-buffer"), ("-i",), ("-f", "--fail")):
            parser.add_argument(*flags, action="store_true")
        parser.add_argument("-H", dest="headers", action="append", default=[])
        parser.add_argument("-F", dest="forms", action="append", default=[])
        parser.add_argument("-d", dest="data")
        parser.add_argument("-X", dest="method")
        parser.add_argument("-o", dest="output")
        parser.add_argument("url")
        given = parser.parse_args(argv)
        method = given.method or ("POST" if given.data is not None or given.forms else "GET")
        # a server without keys needs none
        headers = dict(header.split(": ", 1) for header in given.headers)
        headers = {name: value for name, value in headers.items() if name.lower() not in ("authorization", "x-api-key")}
        files = [self._form(form, cwd) for form in given.forms]
        body: str | None = given.data
        if body is not None and body.startswith("@"):
            body = (cwd / body[1:]).read_text()
        text = self.send(method, given.url, headers, body, files)
        if given.output:
            (cwd / given.output).write_text(text)
        return Done("" if given.output else text)

    def _form(self, form: str, cwd: Path) -> tuple[str, Any]:
        name, _, value = form.partition("=")
        return (name, (value[1:], (cwd / value[1:]).read_bytes())) if value.startswith("@") else (name, (None, value))

    def send(self, method: str, url: str, headers: Mapping[str, str], body: str | None, files: Any = ()) -> str:
        """Send a request to the server and return the answer. Raises NotAsDocumentedError unless it succeeds."""
        base = next((base for base in SERVED if url.startswith(base)), None)
        if base is None:
            raise NotAsDocumentedError("another server's address")
        path = url.removeprefix(base)
        if body is not None and not self._is_served(method, path, body):
            return "{}\n"
        answer = httpx.request(
            method, self.server.url + path, headers=dict(headers), content=body, files=list(files) or None, timeout=15
        )
        if not answer.is_success:
            raise NotAsDocumentedError(f"{answer.status_code} {answer.text}")
        if method == "POST" and '"usage"' in answer.text:
            self.request_ids.append(answer.headers["x-quipu-request-id"])
        if "json" in answer.headers.get("content-type", ""):
            self.answers.append(answer.json())
        elif "event-stream" in answer.headers.get("content-type", ""):
            self.answers += [json.loads(data) for data in re.findall(r"^data: (\{.*)$", answer.text, re.MULTILINE)]
        return answer.text

    def with_request_id(self, text: str) -> str:
        """Return a block with the id of the last request in place of those that it shows."""
        if not _REQUEST_ID.search(text):
            return text
        if not self.request_ids:
            self.has_made_request = True
            body = '{"prompt": "A quipu is", "max_tokens": 4}'
            self.send("POST", f"{SERVED[0]}/v1/completions", {"Content-Type": "application/json"}, body)
            self.answers.clear()
        self.server.wait_at_rest()
        return _REQUEST_ID.sub(self.request_ids[-1], text)

    def _is_served(self, method: str, path: str, body: str) -> bool:
        """Check a body against the document; return whether the demo model can serve it."""
        item = self.document["paths"].get(path.partition("?")[0])
        if item is None or method.lower() not in item:
            raise NotAsDocumentedError(f"the server has no {method} {path}")
        value = json.loads(body)
        schema = item[method.lower()]["requestBody"]["content"]["application/json"]["schema"]
        if problem := jsonschema.exceptions.best_match(
            jsonschema.Draft202012Validator({**schema, "components": self.document["components"]}).iter_errors(value)
        ):
            raise NotAsDocumentedError(f"{problem.json_path}: {problem.message}")
        return not FOREIGN_MODELS.match(value.get("model", "")) and not value.keys() & LACKING.keys()

    # ------------------------------------------------------------ quipu

    def quipu(self, argv: Sequence[str], call: Call) -> Done:
        """Run a command, resolve a server's settings, or parse flags. A path of a wheel or a model need not exist."""
        command = argv[0] if argv else ""
        argv = [word.replace(base, self.server.url) for word in argv for base in SERVED[:1]]
        if command == "serve":
            return self.resolved(argv[1:], call)
        if command in RUN:
            if command in ("chat", "explain"):
                argv = [*argv, "--base-url", self.server.url]
            if command == "chat" and "--temperature" not in argv:
                # the demo model's own is 0.3, and the counts depend on the answers
                argv = [*argv, "--temperature", "0"]
            if command in ("ledger", "usage"):
                self.wait_booked()
        elif (lighter := lightened(argv, self.server.url)) is not None:
            argv = lighter
        elif command == "audit" and "--compare" in argv:
            save_audits(call.cwd, argv[argv.index("--compare") + 1 :])
        elif tuple(argv[:2]) in FORKED:
            return self.forked([*argv, *FORKED[tuple(argv[:2])]], call)
        elif command == "doctor":
            done = self.within(call, lambda: quipu(list(argv)))
            # a machine with a problem is not one of the page
            return attrs.evolve(done, code=0) if done.code == 1 and rows_of_doctor(done.stdout) else done
        elif any(map(ELSEWHERE.match, argv)):
            parse(quipu, argv)
            return Done()
        else:
            raise NotAsDocumentedError("nobody runs this command")
        return self.within(call, lambda: quipu(list(argv)))

    def forked(self, argv: Sequence[str], call: Call) -> Done:
        """Run a command that loads torch or starts an engine in a process that is forked from one that has both."""
        ended = run_quipu(*argv, folder=call.cwd)
        return Done(ended.stdout, ended.stderr, ended.returncode)

    def within(self, call: Call, run: Callable[[], int]) -> Done:
        """Run something as the program that was called."""
        out, err, given = io.StringIO(), io.StringIO(), io.StringIO(call.stdin)
        with (
            contextlib.chdir(call.cwd),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(sys, "stdin", given),
            mock.patch.dict(os.environ, {**call.environment, "NO_COLOR": "1"}),
            mock.patch.object(resource, "setrlimit"),  # by a benchmark, for its connections
            batches_on(self.server.url),
        ):
            try:
                code = run()
            except SystemExit as left:
                code = int(left.code or 0)
        return Done(out.getvalue(), err.getvalue(), code)

    def resolved(self, argv: Sequence[str], call: Call) -> Done:
        """Parse the flags of a server, read its files and resolve its settings, all but start it."""
        said: list[str] = []
        done = self.within(call, lambda: resolve_server(argv, call.cwd, said.append))
        return attrs.evolve(done, stderr=done.stderr + "\n".join(said))

    def wait_booked(self) -> None:
        """Wait until all requests, one at least, are in the ledger's database."""
        self.with_request_id("req-...")
        eventually(lambda: not self.server.wait_at_rest()["ledger_unloaded_bytes"], "all records are loaded")

    def synopsis(self, line: str, folder: Path) -> None:
        """Check the command lines that a synopsis stands for. Raises NotAsDocumentedError."""
        words = line.split()
        if words[0] == "make":
            self.make(shlex.split(line, comments=True)[1:], Call([], ROOT))
            return
        if words[0] != "quipu" and not words[0].startswith("python"):
            raise NotAsDocumentedError(f"{words[0]} has a synopsis that nobody checks")
        check_flags_exist(line)
        if words[:2] == ["quipu", "quantize"]:
            for number, one in enumerate(spelled_out(line)):
                stand_ins = {"MODEL": str(TINY), "OUT": f"quantized-{number}"}
                done = self.forked([stand_ins.get(word, word) for word in one.split()[1:]], Call([], folder))
                if done.code:
                    raise NotAsDocumentedError(done.stderr)

    # ------------------------------------------------------------ other programs

    def make(self, argv: Sequence[str], call: Call) -> Done:
        """Ask make what it would run, and answer that if it is `quipu`; of the rest, modules and flags must exist."""
        commands = would_run(argv)
        check_repository_has(argv, commands)
        answers = [self.quipu(words, call) for words in quipu_in(commands)]
        return next((done for done in answers if done.code), answers[-1] if answers else Done())

    def python(self, argv: Sequence[str], cwd: Path) -> Done:
        """Parse the flags of a module of the repository; a new environment has the programs of the page.

        `test_page_benchmarks.py` runs those of `bench`.
        """
        if argv[:1] == ["-c"]:
            done = subprocess.run([sys.executable, *argv], cwd=cwd, capture_output=True, text=True, check=False)
            return Done(done.stdout, done.stderr, done.returncode)
        if argv[:1] != ["-m"]:
            raise NotAsDocumentedError("only modules are checked")
        if argv[1] == "venv":
            (cwd / argv[2]).mkdir()
            (cwd / argv[2] / "bin").symlink_to(self.bin)
        if argv[1] in ("pip", "venv"):
            return self.not_run(argv[2:])
        if argv[1] not in MODULES_NOT_RUN and not argv[1].startswith("bench."):
            raise NotAsDocumentedError("nobody runs this module")
        parse_module(argv[1:])
        return Done()

    def not_run(self, argv: Sequence[str]) -> Done:
        """Check that files of the repository among the arguments exist, and that wheels have a name as ours."""
        for word in argv:
            if re.match(r"(?:\./)?(?:deploy|docs|bench)/", word) and not (ROOT / word).exists():
                raise NotAsDocumentedError(f"there is no {word}")
            if wheel := re.search(r"quipu_llm-([\d.]*|\*|…)(?:-|\.whl).*?(?:\[(\w+)\])?$", word):
                project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
                if wheel[2] and wheel[2] not in project["optional-dependencies"]:
                    raise NotAsDocumentedError(f"there is no extra {wheel[2]}")
        return Done()
