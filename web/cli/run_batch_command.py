"""`quipu run-batch -i IN.jsonl -o OUT.jsonl --model MODEL`: run a file of requests, as vLLM's command does.

It starts a server of its own on a free port of this machine, with a data directory that is removed at the end unless
`--data-dir` names one, gives it the file, and writes the results of both files, each line once. All flags of `quipu
serve` may follow. Exit codes: 0 when every line has an answer, 1 after an error or if some line has none, 130 if
interrupted.

What must always hold: the output appears when it is complete; the server ends with this process.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import orjson

from .command_output import EXIT_FAILED, EXIT_INTERRUPTED
from .command_progress import command_progress
from .one_line_parser import OneLineParser, folder

POLL_S: Final = 0.2
STOP_S: Final = 60.0
_MAX_HEAD_BYTES: Final = 64 << 20
_OWN_FLAGS: Final = frozenset({"--host", "--port", "--api-key", "--key-file", "--batches"})


class RunBatchError(Exception):
    """The batch could not be run. The message is for the user."""


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` is without `run-batch`. Returns the exit code."""
    parser = make_parser()
    arguments, serve_flags = parser.parse_known_args(argv)
    for flag in serve_flags:
        if flag.partition("=")[0] in _OWN_FLAGS:
            parser.error(f"{flag} is not a flag of this command, which serves nobody else")
    try:
        return _run(arguments, serve_flags)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"quipu run-batch: {where}{error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED
    except (RunBatchError, httpx2.HTTPError) as error:
        print(f"quipu run-batch: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("quipu run-batch: interrupted, and no output was written", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(arguments: argparse.Namespace, serve_flags: Sequence[str]) -> int:
    source, target = Path(arguments.input_file), Path(arguments.output_file)
    endpoint = _endpoint_of(source)
    with tempfile.TemporaryDirectory(prefix="quipu-batch-") as folder:
        data_dir = arguments.data_dir or str(Path(folder) / "data")
        flags = ["--model", arguments.model, "--data-dir", data_dir, "--batch-concurrency", str(arguments.concurrency)]
        with _serving([*flags, *serve_flags], Path(folder)) as http:
            batch = _start(http, source, endpoint)
            done = wait_for_end(http, batch["id"])
            if done["status"] != "completed":
                raise RunBatchError(_why_not(done))
            part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
            with part.open("xb") as output:
                for name in ("output_file_id", "error_file_id"):
                    if done[name] is not None:
                        with http.stream("GET", f"/v1/files/{done[name]}/content") as content:
                            content.raise_for_status()
                            for data in content.iter_bytes():
                                output.write(data)
            part.replace(target)
    counts = done["request_counts"]
    print(f"{counts['completed']} answers and {counts['failed']} errors in {target}", file=sys.stderr)
    return EXIT_FAILED if counts["failed"] else 0


def _endpoint_of(source: Path) -> str:
    """Return the `url` of the first line, which all lines must have. Raises RunBatchError."""
    with source.open("rb") as file:
        head = file.readline(_MAX_HEAD_BYTES)
    try:
        return str(orjson.loads(head)["url"])
    except (ValueError, KeyError, TypeError):
        raise RunBatchError(f"{source}: line 1 is not a request with a `url`") from None


@contextmanager
def _serving(flags: Sequence[str], folder: Path) -> Iterator[httpx2.Client]:
    """Run a server until the block is left. Raises RunBatchError if it does not start."""
    log_path = folder / "log"
    command = [sys.executable, "-m", "quipu.web.cli.cli", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)  # noqa: S603
    try:
        with command_progress("starting the server"):
            url = _wait_ready(process, log_path)
        with httpx2.Client(base_url=url, timeout=None, trust_env=False) as http:
            yield http
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], log_path: Path) -> str:
    """Return the server's URL once it is ready. Raises RunBatchError with its last words."""
    while True:
        lines = log_path.read_bytes().splitlines()
        for line in lines:
            if b'"server.ready"' in line:
                return str(orjson.loads(line)["url"]).removesuffix("/ui")
        if process.poll() is not None:
            last = lines[-1].decode("utf-8", "replace") if lines else f"exit code {process.returncode}"
            raise RunBatchError(f"the server did not start: {last}")
        time.sleep(POLL_S)


def _start(http: httpx2.Client, source: Path, endpoint: str) -> Any:
    with source.open("rb") as file:
        answer = http.post("/v1/files", data={"purpose": "batch"}, files={"file": (source.name, file)})
    uploaded = _json(answer)
    wanted = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": "30d"}
    return _json(http.post("/v1/batches", json=wanted))


def wait_for_end(http: httpx2.Client, batch_id: str) -> Any:
    """Return the batch at its end, and show meanwhile how far it is."""
    path = f"/v1/batches/{batch_id}"
    with command_progress("reading the file"):
        while (batch := _json(http.get(path)))["status"] == "validating":
            time.sleep(POLL_S)
    num_done = 0
    with command_progress("lines", batch["request_counts"]["total"], "lines") as count:
        while True:
            counts = batch["request_counts"]
            count(counts["completed"] + counts["failed"] - num_done)
            num_done = counts["completed"] + counts["failed"]
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                return batch
            time.sleep(POLL_S)
            batch = _json(http.get(path))


def _json(answer: httpx2.Response) -> Any:
    if answer.status_code != 200:
        try:
            message = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"status {answer.status_code}"
        raise RunBatchError(message)
    return answer.json()


def _why_not(batch: Any) -> str:
    errors = (batch["errors"] or {}).get("data") or []
    if not errors:
        return f"the batch is {batch['status']}"
    first = errors[0]
    where = "" if first["line"] is None else f"line {first['line']}: "
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{where}{first['message']}{more}"


def make_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="quipu run-batch",
        description="Run a file of requests, one a line, and write their results. Flags of `quipu serve` may follow.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-i", "--input-file", required=True, metavar="IN", help="requests, in the format of OpenAI's batches (JSONL)")
    add("-o", "--output-file", required=True, metavar="OUT", help="where results are written, each line once")
    add("--model", default="demo", metavar="MODEL", help="the checkpoint, as for `quipu serve` (default: demo)")
    add("--concurrency", type=int, default=64, metavar="N", help="lines that run at once (default: %(default)s)")
    data_help = "where the ledger is kept (default: a folder that is removed at the end)"
    add("--data-dir", type=folder, metavar="FOLDER", help=data_help)
    return parser
