"""What the programs in the documents' shell blocks do in the tests: sent to a server, run, parsed, or not run.

`Programs.answer` has one method for each. What only parses its arguments costs nothing; what is sent or run must
succeed. A server is not started: its flags, files and settings are read. `NOT_RUN` says why the others are not run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import resource
import secrets
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import httpx
import jsonschema

from quipu.web.cli.cli import main as quipu
from tests.e2e.servers import Server
from tests.processes import eventually

from .page_blocks import ROOT
from .page_commands import batches_on, lightened, resolve_server
from .page_shell import Call, Done

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
RUN = {"chat", "completion", "explain", "keys", "ledger", "models", "usage"}
"""Commands that are run as they are. Those in `page_commands.py` are run with less to do; servers are not started."""
OTHERS = ("curl", "make", "python", "python3", "quipu")
FOREIGN_MODELS = re.compile(r"^[A-Z]\w*/")
"""Models of the hub. What is asked of one is checked against the OpenAPI document, and not sent."""
LACKING = {"suffix": "the demo model has no tokens for gaps in a text"}
"""Fields that the demo model cannot serve: checked against the OpenAPI document, and not sent."""
_REQUEST_ID = re.compile(r"\breq-(?:\.\.\.|…|[0-9a-f]{24})")
SERVED = ("http://127.0.0.1:8000", "http://localhost:8000")


class NotAsDocumentedError(Exception):
    """A page shows something that does not work."""


class _Parsed(Exception):
    """Ends a command when its arguments are parsed."""


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
        else:
            return self.parsed(quipu, argv)
        return self.within(call, lambda: quipu(list(argv)))

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

    def parsed(self, command: Any, argv: Sequence[str]) -> Done:
        """Call a command until its arguments are parsed. Raises NotAsDocumentedError if it does not accept them."""
        with (
            _stopping_after_parsing(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            try:
                command(list(argv))
            except _Parsed:
                return Done()
            except SystemExit as left:
                if left.code:
                    raise NotAsDocumentedError(err.getvalue().strip()) from None
        return Done()

    def synopsis(self, line: str) -> None:
        """Check that a command has the flags that a synopsis names. Raises NotAsDocumentedError."""
        words = line.split("  #")[0].split()
        command = list(
            itertools.takewhile(lambda word: re.match(r"[a-z-][\w.-]*$", word) and word[:2] != "--", words[1:])
        )
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            if words[0] == "quipu":
                quipu([*command, "--help"])
            elif words[0].startswith("python"):
                main, argv = _main_of([*command[1:], "--help"])
                with mock.patch.object(sys, "argv", argv):
                    main()
            elif words[0] == "make":
                self.make(shlex.split(line, comments=True)[1:], Call([], ROOT))
            else:
                raise NotAsDocumentedError(f"{words[0]} has a synopsis that nobody checks")
        flags = re.findall(r"--[a-z][\w-]*", line)
        values = [value for found in re.findall(r"--[\w-]+ ([\w-]+(?:\|[\w-]+)+)", line) for value in found.split("|")]
        if words[0] != "make" and (unknown := [word for word in [*flags, *values] if word not in out.getvalue()]):
            raise NotAsDocumentedError(f"{' '.join(words[:1] + command)} has no {', '.join(unknown)}")

    # ------------------------------------------------------------ other programs

    def make(self, argv: Sequence[str], call: Call) -> Done:
        """Check that the targets and variables exist; parse the flags for `quipu`, and run `make chat`."""
        text = (ROOT / "Makefile").read_text()
        variables = dict(word.split("=", 1) for word in argv if "=" in word)
        targets = [word for word in argv if "=" not in word]
        for name in variables:
            if not re.search(rf"^{name} \??:?=", text, re.MULTILINE):
                raise NotAsDocumentedError(f"the Makefile has no variable {name}")
        for target in targets:
            if not re.search(rf"^{re.escape(target)}:", text, re.MULTILINE):
                raise NotAsDocumentedError(f"the Makefile has no target {target}")
        flags = shlex.split(variables.get("ARGS", ""))
        if "serve" in targets:
            return self.quipu(["serve", variables.get("MODEL", "demo"), *flags], call)
        return self.quipu(["chat", *flags], call) if "chat" in targets else Done()

    def python(self, argv: Sequence[str], cwd: Path) -> Done:
        """Parse the flags of a module of the repository; a new environment has the programs of the page."""
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
        main, words = _main_of(argv[1:])
        with mock.patch.object(sys, "argv", words):
            return self.parsed(lambda _: main(), argv)

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


def _main_of(words: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the `main` of a module that is run with `-m`, and the arguments that it sees."""
    try:
        spec = importlib.util.find_spec(words[0])
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise NotAsDocumentedError(f"there is no module {words[0]}")
    name = f"{words[0]}.__main__" if spec.submodule_search_locations else words[0]
    return importlib.import_module(name).main, [name, *words[1:]]


@contextlib.contextmanager
def _stopping_after_parsing() -> Iterator[None]:
    """Have every outermost parser raise _Parsed once its arguments are valid."""
    parse, depth = argparse.ArgumentParser.parse_known_args, [0]

    def stop(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        depth[0] += 1
        try:
            parsed, unknown = parse(parser, args, namespace)
        finally:
            depth[0] -= 1
        if depth[0]:
            return parsed, unknown
        if unknown:
            parser.error(f"unknown arguments: {' '.join(unknown)}")
        raise _Parsed

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        yield
