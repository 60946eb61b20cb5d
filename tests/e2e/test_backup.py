"""The commands of `docs/operate/upgrade-and-backup.md`, read from the page: a copy of a running server, restored."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import trio

from quipu.actors.ledger.reading import open_reader
from quipu.actors.ledger.service import LedgerConfig, open_ledger
from tests.actors.ledger.ledgers import record_of, so_far_of
from tests.e2e.ledger_command import ledger
from tests.e2e.ledger_kills import SMALL_SEGMENT
from tests.e2e.prompts import token_prompt
from tests.e2e.script_quipu import quipu_for_scripts
from tests.e2e.servers import PATIENCE_S, serving
from tests.e2e.streams import streaming
from tests.postgres import Postgres
from tests.processes import eventually

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate" / "upgrade-and-backup.md"
FLAGS = ("--executor", "fake", "--ledger-segment-bytes", str(SMALL_SEGMENT))


def commands(heading: str) -> list[str]:
    """Return the commands of a section's blocks."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """A PATH with `quipu` and `python3`."""
    with quipu_for_scripts(tmp_path / "bin") as path:
        yield path


def run_in(folder: Path, path: str, script: str, code: int = 0, **environment: str) -> str:
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def records(folder: Path) -> dict[str, dict[str, Any]]:
    lines = ledger(folder, "export", "--format", "jsonl").stdout.splitlines()
    return {line["request_id"]: line for line in map(json.loads, lines)}


def test_copy_and_restore(tmp_path: Path, path: str) -> None:
    """A copy of a busy server has all records that were closed by then; restored, it goes on, and signs as before.

    A copy that misses a segment, which the server deleted meanwhile, is found out when it is made.
    """
    (copy,) = commands("Copy while it runs")
    (restore,) = commands("Restore")
    database, folder = re.split(r"(?=^rm -f )", copy, flags=re.MULTILINE)
    run = partial(run_in, tmp_path, path)
    with serving(tmp_path, *FLAGS, exit_code=0) as server, httpx.Client(timeout=PATIENCE_S) as http:

        def ask_one(number: int) -> str:
            long = {"X-Request-Id": f"{number}".rjust(250, "x"), "Idempotency-Key": f"{uuid4()}".rjust(250, "x")}
            body = {"model": "demo", "prompt": token_prompt("tag", 40), "max_tokens": 1}
            return http.post(f"{server.url}/v1/completions", json=body, headers=long).headers["X-Quipu-Request-Id"]

        def ask(count: int) -> list[str]:
            with ThreadPoolExecutor(8) as threads:
                return list(threads.map(ask_one, range(count)))

        seen = ask(1)
        run(database)
        (first,) = (tmp_path / "data" / "ledger").glob("*.wal")
        seen += ask(120)  # more than a segment has room for
        eventually(lambda: not first.exists(), "the first segment is deleted")
        assert "bad" in run(folder, code=1)
        with streaming(server, token_prompt("open", 40), 4000):
            with streaming(server, token_prompt("ends", 40), 40) as ends:
                run(database)
                ends.read_all()
            seen += ask(2)
            assert "in order" in run(folder)
            missing = ask(1)
        receipt, keys = tmp_path / "receipt.json", tmp_path / "keys.json"
        receipt.write_bytes(server.get(f"/v1/usage/{seen[0]}/receipt").content)
        keys.write_bytes(server.get("/v1/usage/keys").content)
    written = records(tmp_path)
    assert "in order" in run(restore)
    with serving(tmp_path, *FLAGS, exit_code=0) as server:
        later = server.complete(token_prompt("tag", 40), 3).headers["X-Quipu-Request-Id"]
    restored = records(tmp_path)
    assert {*seen, later} < restored.keys() and not set(missing) & restored.keys()
    assert all(restored[one] == written[one] for one in seen)
    assert [one["recovered"] for one in restored.values()].count(True) == 1  # the stream that was open
    assert ledger(tmp_path, "verify").stdout.startswith("in order")
    assert ledger(tmp_path, "verify-receipt", str(receipt), "--keys", str(keys)).returncode == 0


async def keep(folder: Path, url: str, *names: str) -> None:
    """Have a server's ledger write the records of finished requests, and load them into its database."""
    async with open_ledger(LedgerConfig(folder, url=url, segment_bytes=SMALL_SEGMENT)) as ledger:
        for name in names:
            assert ledger.journal.admit(so_far_of(name))
        ledger.journal.flush()
        for name in names:
            ledger.journal.close(record_of(name), lambda: None)
        ledger.journal.flush()
        with trio.fail_after(PATIENCE_S):
            while ledger.loader.position is None or ledger.loader.position < ledger.journal.durable:
                await trio.sleep(0.01)


def test_copy_and_restore_with_postgresql(postgres: Postgres, tmp_path: Path, path: str) -> None:
    """A dump and the folder's copy, restored over what came later, have the records of then, and the ledger goes on."""
    dump, restore = commands("With PostgreSQL")
    url = postgres.new_database()
    run = partial(run_in, tmp_path, os.pathsep.join((str(postgres.programs), path)), QUIPU_LEDGER_URL=url)
    trio.run(keep, tmp_path / "data", url, "one", "two")
    run(dump)
    trio.run(keep, tmp_path / "data", url, "lost")
    assert run(restore).startswith("in order: 2 records")
    trio.run(keep, tmp_path / "data", url, "later")
    with open_reader(data_dir=tmp_path / "data", url=url) as reader:
        assert [reader.get(name) is not None for name in ("one", "two", "lost", "later")] == [True, True, False, True]
    assert ledger(tmp_path, "verify", QUIPU_LEDGER_URL=url).stdout.startswith("in order: 3 records")
