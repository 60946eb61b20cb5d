"""The ledger of real servers: its commands, a database outage, and a full disk."""

from __future__ import annotations

import csv
import io
import json
import os
import socket
import sqlite3
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from quipu.actors.ledger.reading import open_reader
from tests.e2e.ledger_command import ledger
from tests.e2e.prompts import token_prompt
from tests.e2e.servers import PATIENCE_S, Server, eventually, run_quipu, serve_command, serving, start_quipu
from tests.e2e.streams import streaming
from tests.postgres import PASSWORD, Postgres

FAKE = ["--executor", "fake"]


def ledger_process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `quipu ledger ARGUMENTS` in a server's folder, as an operator does."""
    return run_quipu("ledger", *arguments, folder=folder)


def ask(server: Server, tag: str, **fields: Any) -> str:
    """Send a request and return its id."""
    answer = server.complete(token_prompt(tag, 40), 3, **fields)
    assert answer.status_code == 200, answer.text
    return answer.headers["X-Quipu-Request-Id"]


def test_commands(tmp_path: Path) -> None:
    """Verify, export and reconcile agree with the responses: while serving, after a kill, after a clean exit."""
    with serving(tmp_path, *FAKE, exit_code=0) as server:
        seen = [ask(server, f"tag {i % 2}") for i in range(4)]
        server.wait_at_rest()
        live = ledger(tmp_path, "reconcile", "--metrics-url", f"{server.url}/metrics", "--json")
        (account,) = json.loads(live.stdout)
        sums = {line["name"]: line for line in account["sums"]}
        assert live.returncode == 0 and account["ended"] == "running" and account["agrees"]
        assert sums["prompt_tokens_total"]["ledger"] == sums["prompt_tokens_total"]["counter"] == 160
        assert sums["prefix_cache_hits_total"]["counter"] == 64
        receipt = tmp_path / "receipt.json"
        receipt.write_bytes(server.get(f"/v1/usage/{seen[1]}/receipt").content)
        checked = json.loads(ledger(tmp_path, "verify-receipt", str(receipt), "--json").stdout)
        assert checked["problems"] == [] and checked["is_signer_known"] and checked["is_compared"]
        assert (checked["record"]["request_id"], checked["record"]["completion_tokens"]) == (seen[1], 3)
        with streaming(server, token_prompt("open", 40), 4000):
            assert "in order" in ledger(tmp_path, "verify").stdout
            server.process.kill()
            server.process.wait()
    down = ledger(tmp_path, "verify")
    assert down.returncode == 0 and "open: 1 requests were admitted" in down.stdout and "bad" not in down.stdout
    rows = list(csv.DictReader(io.StringIO(ledger(tmp_path, "export").stdout)))
    assert [row["request_id"] for row in rows] == seen
    assert [(row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) for row in rows[2:]] == [
        ("40", "32", "3"),
        ("40", "32", "3"),
    ]
    with serving(tmp_path, *FAKE) as server:
        seen.append(ask(server, "again"))
    lines = [json.loads(line) for line in ledger(tmp_path, "export", "--format", "jsonl").stdout.splitlines()]
    assert len(lines) == 6 and {line["request_id"] for line in lines} > set(seen)
    assert [line["recovered"] for line in lines].count(True) == 1
    parquet = ledger(tmp_path, "export", "--format", "parquet", "--output", str(tmp_path / "out.parquet"))
    assert parquet.returncode == 0 and read_parquet(tmp_path / "out.parquet") == lines
    reconciled = json.loads(ledger(tmp_path, "reconcile", "--json").stdout)
    assert [one["ended"] for one in reconciled] == ["killed", "stopped"] and all(one["agrees"] for one in reconciled)
    assert ledger(tmp_path, "verify").stdout == "in order: 6 records of 2 server starts\n"


def read_parquet(path: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def test_verify_names_changed_record(tmp_path: Path) -> None:
    """Verify names a record that was changed, and exits with 1."""
    with serving(tmp_path, *FAKE) as server:
        seen = [ask(server, f"tag {i}") for i in range(3)]
    (segment,) = (tmp_path / "data" / "ledger").glob("*.wal")
    segment.write_bytes(b"")
    assert ledger_process(tmp_path, "verify").returncode == 0
    database = tmp_path / "data" / "ledger.sqlite3"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("update usage_records set completion_tokens = 30 where request_id = ?", [seen[1]])
    found = ledger_process(tmp_path, "verify")
    assert found.returncode == 1 and f"request {seen[1]}: completion_tokens is 30 in the database" in found.stdout


def test_invalid_arguments(tmp_path: Path) -> None:
    """A missing ledger, a bad URL and a bad time are reported in one line, with exit code 2."""
    nothing = ledger(tmp_path, "verify")
    assert nothing.returncode == 2 and nothing.stderr.startswith(f"quipu: there is no ledger in {tmp_path / 'data'}: ")
    url = ledger(tmp_path, "export", "--ledger-url", "mysql://u:s3cret@h/d")
    assert url.returncode == 2 and "s3cret" not in url.stderr and "--ledger-url" in url.stderr
    assert "invalid time" in ledger(tmp_path, "export", "--since", "yesterday").stderr


def test_second_server_in_same_folder(tmp_path: Path) -> None:
    """The second server reports that the folder is in use, and exits."""
    with serving(tmp_path, *FAKE):
        process, log = start_quipu(tmp_path / "second", *serve_command(*FAKE, "--port", "0", "--data-dir", "../data"))
        assert process.wait(PATIENCE_S) == 1
        assert "another server keeps its ledger in ../data: each needs its own --data-dir" in log.read_text()


def test_retry_after_kill(tmp_path: Path) -> None:
    """A retry is recognised although the first server was killed; both count, or one if retries are collapsed."""
    key = {"headers": {"Idempotency-Key": "order-1"}}
    body = {"model": "demo", "prompt": token_prompt("order", 40), "max_tokens": 3, "temperature": 0}
    with serving(tmp_path, *FAKE) as server:
        first = server.post("/v1/completions", body, **key).headers["X-Quipu-Request-Id"]
        server.process.kill()
        server.process.wait()
    with serving(tmp_path, *FAKE) as server:
        again = server.post("/v1/completions", body, **key).headers["X-Quipu-Request-Id"]
        other = server.post("/v1/completions", body | {"max_tokens": 4}, **key).headers["X-Quipu-Request-Id"]
        with open_reader(data_dir=tmp_path / "data") as reader:
            retries = {found.record.request_id: found.record.retry_of for found in reader.records()}
            assert retries == {first: None, again: first, other: None}
            assert reader.sums()[0].num_requests == 3
            assert reader.sums(collapse_retries=True)[0].num_requests == 2


def test_many_requests_never_admitted(tmp_path: Path) -> None:
    """Requests that are too long, or that their clients leave while they wait, do not fill the ledger: only some get
    records, but all are counted, and reconcile agrees, while serving and afterwards."""
    flags = [*FAKE, "--max-refusal-records", "5", "--max-model-len", "4096", "--max-num-seqs", "1"]
    flags += ["--fake-step-seconds", "0.02"]
    with serving(tmp_path, *flags, exit_code=0) as server:
        served = ask(server, "served")
        for number in range(30):
            refused = server.complete(token_prompt(f"tag {number}", 40), 5000)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        with streaming(server, token_prompt("running", 40), 4000), ExitStack() as leaving:
            for number in range(8):
                body = json.dumps({"model": "demo", "prompt": token_prompt(f"left {number}", 40)})
                head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                client = leaving.enter_context(socket.create_connection(server.address))
                client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            eventually(lambda: server.metrics()["num_requests_waiting"] == 8, "eight wait")
            leaving.close()
            eventually(lambda: server.metrics()["num_requests_waiting"] == 0, "all have left")
        counters = server.wait_at_rest()
        assert counters['requests_total{outcome="rejected"}'] == 30
        assert counters['requests_total{outcome="cancelled"}'] == 9
        assert counters['usage_records_suppressed_total{outcome="cancelled"}'] == 8
        assert counters['usage_records_suppressed_total{outcome="rejected"}'] == 25
        assert server.get(f"/v1/usage/{served}").status_code == 200
        assert server.get(f"/v1/usage/{refused.headers['X-Quipu-Request-Id']}").status_code == 404
        live = ledger(tmp_path, "reconcile", "--metrics-url", f"{server.url}/metrics")
        assert live.returncode == 0 and "33 requests that were never admitted were counted" in live.stdout
        eventually(lambda: server.events("ledger.records_suppressed"), "it is logged")
        assert server.log_text.count("ledger.records_suppressed") == 1
    assert ledger(tmp_path, "verify").stdout == "in order: 7 records of 1 server starts\n"
    (account,) = json.loads(ledger(tmp_path, "reconcile", "--json").stdout)
    assert account["agrees"] and account["num_suppressed"] == 33
    rejected = next(line for line in account["sums"] if line["name"] == 'requests_total{outcome="rejected"}')
    assert rejected["ledger"] == rejected["counter"] == 30


def test_reconcile_with_key(tmp_path: Path) -> None:
    """Reconcile can read the counters of a server that requires a key."""
    flags = ["--api-key", "key-of-a-client", "--admin-key", "key-of-an-operator"]
    with serving(tmp_path, *FAKE, *flags) as server:
        question = ["reconcile", "--metrics-url", f"{server.url}/metrics"]
        assert "401" in ledger(tmp_path, *question).stderr
        answer = ledger(tmp_path, *question, QUIPU_ADMIN_KEY="key-of-an-operator")
        assert answer.returncode == 0 and ", running" in answer.stdout


def test_fsync(tmp_path: Path) -> None:
    """Everything works the same with --ledger-fsync."""
    with serving(tmp_path, *FAKE, "--ledger-fsync") as server:
        with ThreadPoolExecutor(8) as pool:
            seen = list(pool.map(lambda i: ask(server, f"tag {i}"), range(40)))
        with open_reader(data_dir=tmp_path / "data") as reader:
            assert {found.record.request_id for found in reader.records()} == set(seen)
    assert ledger(tmp_path, "verify").stdout == "in order: 40 records of 1 server starts\n"


def test_shutdown_closes_accounts(tmp_path: Path) -> None:
    """A stop during requests ends them; each has a record, which agrees with the counters."""
    with ExitStack() as clients:
        with serving(tmp_path, *FAKE, "--shutdown-timeout", "0.2") as server:
            for i in range(5):
                clients.enter_context(streaming(server, token_prompt(f"open {i}", 40), 4000))
            assert server.stop() == 0
    verdict = ledger(tmp_path, "verify")
    assert verdict.stdout == "in order: 5 records of 1 server starts\n"
    (account,) = json.loads(ledger(tmp_path, "reconcile", "--json").stdout)
    assert account["agrees"], account


def test_postgres_outage(postgres: Postgres, tmp_path: Path) -> None:
    """The database is stopped and started under load: requests are served, nothing is lost, no password is logged."""
    os.environ["QUIPU_LEDGER_URL"] = url = postgres.new_database()
    try:
        with serving(tmp_path, *FAKE) as server, ThreadPoolExecutor(8) as pool:
            first = [pool.submit(ask, server, f"first {i}") for i in range(40)]
            postgres.stop()
            away = [pool.submit(ask, server, f"away {i}") for i in range(40)]
            seen = {future.result() for future in (*first, *away)}
            eventually(lambda: server.metrics()["ledger_database_up"] == 0, "the server notices")
            assert server.get("/health").status_code == 200
            postgres.start()
            seen |= {ask(server, f"back {i}") for i in range(5)}
            eventually(lambda: server.metrics()["ledger_unloaded_bytes"] == 0, "all entries are loaded")
            assert PASSWORD not in server.log_text and PASSWORD not in server.get("/server_info").text
            for event in ("ledger.database_away", "ledger.database_back"):
                eventually(lambda event=event: server.events(event), f"{event} is logged")
    finally:
        del os.environ["QUIPU_LEDGER_URL"]
    with open_reader(url=url) as reader:
        assert sorted(found.record.request_id for found in reader.records()) == sorted(seen)
    assert "in order: 85 records" in ledger(tmp_path, "verify", QUIPU_LEDGER_URL=url).stdout


def test_full_disk(tmp_path: Path) -> None:
    """On a small file system that fills up, requests get a clear 503, and every admitted request has its record."""
    disk = Path(tempfile.mkdtemp(dir=tmp_path))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"NO TINY DISK: mount is not permitted here: {mounted.stderr.decode().strip()}")
    try:
        flags = ["--data-dir", str(disk), "--ledger-segment-bytes", str(256 * 1024)]
        with serving(tmp_path, *FAKE, *flags) as server:
            seen = [ask(server, f"before {i}") for i in range(3)]
            with (disk / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
                while True:
                    ballast.write(bytes(4096))
            refusal = None
            while refusal is None:
                answer = server.complete(token_prompt(f"full {len(seen)}", 40), 3)
                if answer.status_code == 200:
                    seen.append(answer.headers["X-Quipu-Request-Id"])
                else:
                    refusal = answer
            assert refusal.status_code == 503 and "no room for another record" in refusal.json()["error"]["message"]
            assert "Retry-After" in refusal.headers
            health = server.get("/health")
            assert health.status_code == 503 and health.json()["state"] == "refusing" and "No space" in health.text
            assert server.get("/ready").status_code == 503
            with open_reader(data_dir=disk) as reader:
                assert set(seen) <= {found.record.request_id for found in reader.records()}
            (disk / "ballast").unlink()
            eventually(lambda: server.metrics()["ledger_writable"] == 1, "there is room again")
            assert server.get("/health").status_code == 200
            seen.append(ask(server, "after"))
        with open_reader(data_dir=disk) as reader:
            there = [found.record.request_id for found in reader.records()]
            assert set(seen) <= set(there) and len(set(there)) == len(there)
    finally:
        subprocess.run(["umount", disk], check=True)
