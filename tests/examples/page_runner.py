"""Runs or checks every code block of a page, by its language, against one server.

- `bash`: run (`page_shell.py`), with its programs answered by `page_programs.py`.
- `console`: what follows `$ ` is run likewise, and what it shows is compared: JSON with the answer, lines with those
  that were printed (`shown_output.py`). Lines that begin with `> ` are what the user enters.
- `python`: run in this process; the comments at its end are what it prints.
- `json`: compared with the last answers of the page, else with the schemas of the OpenAPI document.
- `http`: a request a line, compared with the document.
- `toml`: a key file or a price file, read as the server reads it.
- `text`: nothing to run; a line that begins with a command is a synopsis, whose flags must exist, or starts a server,
  whose settings must fit. What `quipu audit` prints is compared with an audit (`shown_audit.py`).

`APART` are the blocks that nothing of this can be done with, and where they are tested instead.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from unittest import mock

import attrs

from quipu.web.api.admin.prices import PriceError, read_prices
from quipu.web.auth.key_file import KeyFileError, read_key_file

from .page_blocks import Block, logical_lines
from .page_parsing import SYNOPSIS, NotAsDocumentedError
from .page_programs import SERVED, Programs
from .page_shell import Call, Done, Shell
from .shown_audit import unlike_audit
from .shown_json import differences, fits, objects_in, read_shown, schemas_with_fields
from .shown_output import rows_of_doctor, unlike

APART: Mapping[tuple[str, str], str] = {
    (
        "docs/use/python.md",
        "from quipu import LLM",
    ): "tests/web/library/test_python_page.py runs it in a process of its own",
    ("docs/use/python.md", "import asyncio"): "likewise",
    (
        "docs/use/embeddings.md",
        "from openai import OpenAI",
    ): "needs a model for embeddings: tests/e2e/test_embeddings.py",
    ("docs/operate/bill.md", ""): "tests/e2e/test_bill_page.py runs it, with a server of its own",
    ("docs/operate/upgrade-and-backup.md", ""): "tests/e2e/test_backup.py runs it, with a server of its own",
    ("docs/operate/as-a-service.md", ""): "writes to /etc: `make test-deploy` checks the unit",
    ("docs/operate/kv-events.md", "import msgspec, zmq"): "ends only with Ctrl-C: tests/e2e/test_kv_events.py",
    ("docs/use/usage.md", '{"gen_ai.operation.name"'): "attributes of a span: tests/e2e/test_traces.py",
    ("docs/operate/usage-reports.md", '{"specversion"'): "an event, not an answer: tests of the webhook",
    ("docs/operate/bench-serve.md", '{"model": "demo", "dataset_name"'): "a file: tests/e2e/test_bench_serve.py",
    ("docs/use/tool-calls.md", "const client"): "JavaScript: `make agents`",
}
"""Blocks that are neither run nor checked here, by their page and how they begin, and why."""
_NUMBERS_VARY = re.compile(r"\bquipu (?:usage|ledger|bench)\b")
"""Commands whose numbers are those of all requests that the server has had, or of fewer than on the page."""
_COMMAND = re.compile(r"^(?:\$ )?(?:quipu|python3? -m|make|curl|docker|pip|helm|kubectl) [\w./-]")
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


@attrs.define(eq=False)
class PageRunner:
    """Runs the blocks of one page, which share a folder and what the server answered."""

    programs: Programs
    shell: Shell
    folder: Path
    last_shell: str = ""

    def run(self, block: Block) -> str | None:
        """Run or check a block; return what is wrong with it."""
        if apart_reason(block):
            return None
        check = {
            "bash": self._bash,
            "console": self._console,
            "python": self._python,
            "json": self._json,
            "http": self._http,
            "toml": self._toml,
            "text": self._text,
        }.get(block.language)
        if check is None:
            return f"nobody runs blocks of the language {block.language!r}"
        try:
            return check(block)
        except (NotAsDocumentedError, ValueError) as error:
            return str(error)

    def _bash(self, block: Block) -> str | None:
        if not SYNOPSIS.search(block.text):
            return self._shell(block.text)
        for is_synopsis, group in itertools.groupby(logical_lines(block.text), _is_synopsis):
            lines = list(group)
            problem = self._lines(lines) if is_synopsis else self._shell("\n".join(lines))
            if problem:
                return problem
        return None

    def _shell(self, text: str) -> str | None:
        self.last_shell = self.programs.with_request_id(text)
        if "data/" in text:
            self.programs.wait_booked()
        return self._failure(self.shell.run(self.last_shell, self.folder, self.programs.answer))

    def _failure(self, done: Done) -> str | None:
        return None if done.code == 0 else f"exit code {done.code}: {done.stderr.strip()}"

    def _console(self, block: Block) -> str | None:
        commands = re.findall(r"^\$ ((?:.*\\\n)*.*)$", block.text, re.MULTILINE)
        if not commands:
            return "a console without a line that begins with `$ `"
        entered = "".join(f"{line}\n" for line in re.findall(r"^> (.*)$", block.text, re.MULTILINE))
        shown = re.split(r"^\$ (?:.*\\\n)*.*\n", block.text, flags=re.MULTILINE)[1:]
        for command, output in zip(commands, shown, strict=True):
            command = self.programs.with_request_id(command)
            done = self.shell.run(command, self.folder, lambda call: self.programs.answer(_reading(call, entered)))
            if problem := self._unlike(command, output, done):
                return problem
        return None

    def _unlike(self, command: str, shown: str, done: Done) -> str | None:
        """Return how a console differs from what the command printed. One that failed must show how."""
        if shown.lstrip().startswith("{"):
            return self._failure(done) or self._json_unlike(shown, compares_tokens=False)
        if done.code and not shown.strip():
            return self._failure(done)
        if command.startswith("quipu doctor"):
            rows = rows_of_doctor(shown), rows_of_doctor(done.stdout)
            return None if rows[0] == rows[1] else f"the rows are {', '.join(rows[1])}"
        # the greeting of a chat is for terminals
        lines = [line for line in shown.splitlines() if not line.startswith("> ") and "/help lists" not in line]
        found = unlike(
            "\n".join(lines), f"{done.stdout}\n{done.stderr}", compares_numbers=not _NUMBERS_VARY.search(command)
        )
        return "; ".join(found) or None

    def _python(self, block: Block) -> str | None:
        text = block.text
        for base in SERVED:
            text = text.replace(base, self.programs.server.url)
        out = io.StringIO()
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            warnings.catch_warnings(),
            mock.patch.object(time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.02))),
        ):
            # openai's client serializes what the server compacted to send it again, and warns of types it does not know
            warnings.filterwarnings("ignore", message="Pydantic serializer warnings")
            try:
                exec(compile(text, block.place, "exec"), {"__name__": "__main__"})  # the page's own code
            except Exception as error:
                return "".join(traceback.format_exception(error))
        printed = out.getvalue().splitlines()
        shown = [line.removeprefix("# ") for line in _comments_at_end(text)]
        if shown and [_NUMBER.findall(line) for line in shown] != [_NUMBER.findall(line) for line in printed]:
            return f"it printed {printed}"
        return None

    def _json(self, block: Block) -> str | None:
        problem = self._json_unlike(block.text)
        if problem and self.last_shell and self.programs.answers:
            # the page may show what the same request is answered the second time
            self.shell.run(self.last_shell, self.folder, self.programs.answer)
            problem = self._json_unlike(block.text)
        return problem

    def _json_unlike(self, text: str, *, compares_tokens: bool = True) -> str | None:
        shown = read_shown(text)
        programs = self.programs
        given = [*programs.answers, *programs.server.events("request.done")[-1:]]
        compares_tokens &= not programs.has_made_request
        objects = [one for answer in reversed(given) for one in objects_in(answer)]
        problems = [list(differences(shown, one, compares_tokens=compares_tokens)) for one in objects]
        if [] in problems:
            return None
        nearest = min((found for found in problems if not any(": " not in one for one in found)), key=len, default=None)
        if nearest is not None:
            return f"the answer is not as shown: {nearest}"
        named = programs.document["components"]["schemas"]
        if any(fits(shown, schema, named) for schema in schemas_with_fields(programs.document)):
            return None
        if not list(differences(shown, programs.server.get("/server_info").json(), compares_tokens=False)):
            return None
        return "neither an answer on this page nor a schema of the OpenAPI document has these fields"

    def _http(self, block: Block) -> str | None:
        named, paths = self.programs.document["components"]["schemas"], self.programs.document["paths"]
        for line in block.text.splitlines():
            method, path, *body = line.split(maxsplit=2)
            operation = paths.get(path, {}).get(method.lower())
            if operation is None:
                return f"the server has no {method} {path}"
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", True)
            if body and not fits(read_shown(body[0]), schema, named):
                return f"not a body of {path}: {body[0]}"
        return None

    def _toml(self, block: Block) -> str | None:
        path = self.folder / "page.toml"
        path.write_text(block.text)
        try:
            read_prices(path) if "[[prices]]" in block.text else read_key_file(path)
        except (KeyFileError, PriceError) as error:
            return str(error)
        return None

    def _text(self, block: Block) -> str | None:
        if re.search(r"^> ", block.text, re.MULTILINE):
            return "what a user enters stands in a block of the language console"
        if problem := self._lines(logical_lines(block.text)):
            return problem
        if unprinted := list(unlike_audit(block.text)):
            return "; ".join(unprinted)
        metrics = self.programs.server.get("/metrics").text
        missing = [name for name in re.findall(r"^quipu:\w+", block.text, re.MULTILINE) if f"\n{name}" not in metrics]
        return f"there is no metric {', '.join(missing)}" if missing else None

    def _lines(self, lines: Iterable[str]) -> str | None:
        for line in lines:
            if line.startswith("quipu serve ") and not SYNOPSIS.search(line):
                words = shlex.split(line, comments=True)
                done = self.programs.answer(Call(words, self.folder))
                if done.code:
                    return self._failure(done)
            elif _COMMAND.match(line):
                self.programs.synopsis(line.removeprefix("$ "), self.folder)
        return None


def apart_reason(block: Block) -> str | None:
    """Return why a block is neither run nor checked."""
    return next(
        (why for (page, begin), why in APART.items() if page == block.page and block.text.startswith(begin)), None
    )


def _is_synopsis(line: str) -> bool:
    return bool(SYNOPSIS.search(line))


def _reading(call: Call, entered: str) -> Call:
    return attrs.evolve(call, stdin=call.stdin or entered)


def _comments_at_end(text: str) -> list[str]:
    lines = text.rstrip().splitlines()
    first = next((i for i in range(len(lines), 0, -1) if not lines[i - 1].startswith("# ")), 0)
    return lines[first:]
