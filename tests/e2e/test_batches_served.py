"""Batches with the official clients, real processes and `kill -9`; and `quipu run-batch`."""

from __future__ import annotations

import csv
import io
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from tests.e2e.servers import PATIENCE_S, Server, eventually, run_quipu, serve_command, serving, start_quipu

COMPLETIONS = "/v1/completions"
FAKE = ["--executor", "fake", "--fake-step-seconds", "0.01", "--batch-concurrency", "4"]
NUM_LINES = 40


def lines(num_lines: int, max_tokens: int = 8) -> bytes:
    body = {"model": "demo", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return b"".join(
        json.dumps(
            {"custom_id": f"l{n}", "method": "POST", "url": COMPLETIONS, "body": {**body, "prompt": f"Knot {n}"}}
        ).encode()
        + b"\n"
        for n in range(num_lines)
    )


def start(server: Server, data: bytes) -> Any:
    with server.client() as client:
        file = client.files.create(file=("knots.jsonl", io.BytesIO(data)), purpose="batch")
        return client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")


def ended(server: Server, batch_id: str) -> Any:
    def look() -> Any:
        with server.client() as client:
            batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None

    return eventually(look, "the batch has ended", PATIENCE_S)


def wait_for_lines(server: Server, batch_id: str, num_done: int) -> None:
    def has_run() -> bool:
        with server.client() as client:
            counts = client.batches.retrieve(batch_id).request_counts
        return counts is not None and counts.completed >= num_done

    eventually(has_run, f"{num_done} lines have run", PATIENCE_S)


def records_of(folder: Path, batch_id: str) -> list[dict[str, str]]:
    """Return the batch's records, as the ledger exports them."""
    output = folder / "export.csv"
    done = run_quipu("ledger", "export", "--format", "csv", "--output", str(output), folder=folder)
    assert done.returncode == 0, done.stderr
    with output.open(newline="") as rows:
        return [row for row in csv.DictReader(rows) if row["batch_id"] == batch_id]


def test_official_clients(tmp_path: Path) -> None:
    """OpenAI's and Anthropic's clients run batches, list them and read their results."""
    with serving(tmp_path, *FAKE) as server:
        batch = ended(server, start(server, lines(3)).id)
        assert batch.status == "completed" and batch.request_counts.completed == 3
        with server.client() as client:
            results = client.files.content(batch.output_file_id).text.splitlines()
            assert [json.loads(one)["custom_id"] for one in results] == ["l0", "l1", "l2"]
            assert [one.id for one in client.batches.list()] == [batch.id]
            assert {file.purpose for file in client.files.list()} == {"batch", "batch_output"}
            assert client.files.delete(batch.input_file_id).deleted
        with server.anthropic_client() as claude:
            params: Any = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "Which knots?"}]}
            requests: Any = [
                {"custom_id": "good", "params": params},
                {"custom_id": "bad", "params": {**params, "model": "none"}},
            ]
            created = claude.messages.batches.create(requests=requests)

            def look() -> Any:
                found = claude.messages.batches.retrieve(created.id)
                return found if found.processing_status == "ended" else None

            done = eventually(look, "the batch has ended", PATIENCE_S)
            assert (done.request_counts.succeeded, done.request_counts.errored) == (1, 1)
            kinds = {one.custom_id: one.result.type for one in claude.messages.batches.results(done.id)}
            assert kinds == {"good": "succeeded", "bad": "errored"}
            assert [one.id for one in claude.messages.batches.list()] == [done.id]
            assert claude.messages.batches.delete(done.id).type == "message_batch_deleted"


def test_killed_twice(tmp_path: Path) -> None:
    """After two `kill -9` amid a batch each line has one result, and one record that bills tokens, with equal counts.

    Three servers are started, which takes most of its time: what is tested here cannot be seen within one process.
    """
    batch_id = ""
    for num_done in (5, 20):
        process, log_path = start_quipu(tmp_path, *serve_command(*FAKE), "--port", "0")
        server = Server(process, log_path)
        try:
            server.wait_listening()
            server.wait_ready()
            batch_id = batch_id or start(server, lines(NUM_LINES, 20)).id

            wait_for_lines(server, batch_id, num_done)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    with serving(tmp_path, *FAKE) as server:
        batch = ended(server, batch_id)
        with server.client() as client:
            results = [json.loads(one) for one in client.files.content(batch.output_file_id).text.splitlines()]
    assert batch.request_counts.completed == NUM_LINES and batch.error_file_id is None
    assert Counter(result["custom_id"] for result in results) == Counter(f"l{n}" for n in range(NUM_LINES))
    records = records_of(tmp_path, batch_id)
    counting = {row["request_id"]: row for row in records if not row["fault"]}
    assert {result["response"]["request_id"] for result in results} == set(counting)
    for result in results:
        usage, row = result["response"]["body"]["usage"], counting[result["response"]["request_id"]]
        told = (usage["prompt_tokens"], usage["completion_tokens"])
        assert told == (int(row["prompt_tokens"]), int(row["completion_tokens"]))
    assert {row["fault"] for row in records if row["fault"]} <= {"recovered"}


def test_run_batch(tmp_path: Path) -> None:
    """`quipu run-batch` writes each line's result, and no bar without a terminal."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(6))
    model, *flags = serve_command("--executor", "fake")[1:]
    files = ("-i", str(source), "-o", str(output))
    done = run_quipu("run-batch", *files, "--model", model, *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    results = [json.loads(one)["custom_id"] for one in output.read_bytes().splitlines()]
    assert sorted(results) == [f"l{n}" for n in range(6)]
    said = [line for line in done.stderr.splitlines() if " s so far" not in line]  # which a slow start says
    assert said == [f"6 answers and 0 errors in {output}"]


def test_run_batch_says_why_not(tmp_path: Path) -> None:
    """A file without a request in its first line is refused before anything is started."""
    source = tmp_path / "in.jsonl"
    source.write_text("no line\n")
    done = run_quipu("run-batch", "-i", str(source), "-o", str(tmp_path / "out"), folder=tmp_path)
    assert done.returncode == 1 and done.stderr == (
        f"quipu run-batch: {source}: line 1 is not a request with a `url`\n"
    )
    done = run_quipu("run-batch", "-i", "none", "-o", "out", folder=tmp_path)
    assert (done.returncode, done.stderr) == (1, "quipu run-batch: none: No such file or directory\n")
    done = run_quipu("run-batch", "-i", "a", "-o", "b", "--port", "1", folder=tmp_path)
    assert done.returncode == 2 and "--port is not a flag of this command" in done.stderr
