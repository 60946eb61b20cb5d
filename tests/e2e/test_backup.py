"""The commands of `docs/operate/upgrade-and-backup.md`, read from the page: a copy of a running server, restored."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.e2e.ledger_command import ledger
from tests.e2e.ledger_kills import SMALL_SEGMENT
from tests.e2e.prompts import token_prompt
from tests.e2e.servers import QUIPU, serving
from tests.e2e.streams import streaming
from tests.processes import eventually

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate" / "upgrade-and-backup.md"
FLAGS = ("--executor", "fake", "--ledger-segment-bytes", str(SMALL_SEGMENT))


def commands(heading: str) -> list[str]:
    """Return the commands of a section's blocks."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def run(script: str, folder: Path, code: int = 0) -> str:
    paths = os.pathsep.join((str(Path(sys.executable).parent), str(QUIPU.parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env={**os.environ, "PATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def records(folder: Path) -> dict[str, dict[str, Any]]:
    lines = ledger(folder, "export", "--format", "jsonl").stdout.splitlines()
    return {line["request_id"]: line for line in map(json.loads, lines)}


@pytest.mark.slow  # two servers and five commands: ten seconds
def test_copy_and_restore(tmp_path: Path) -> None:
    """A copy of a busy server has all records that were closed by then; restored, it goes on, and signs as before.

    A copy that misses a segment, which the server deleted meanwhile, is found out when it is made.
    """
    (copy,) = commands("Copy while it runs")
    (restore,) = commands("Restore")
    database, folder = re.split(r"(?=^rm -f )", copy, flags=re.MULTILINE)
    with serving(tmp_path, *FLAGS, exit_code=0) as server:

        def ask_one(number: int) -> str:
            long = {"X-Request-Id": f"{number}".rjust(250, "x"), "Idempotency-Key": f"{uuid4()}".rjust(250, "x")}
            body = {"model": "demo", "prompt": token_prompt("tag", 40), "max_tokens": 1}
            return server.post("/v1/completions", body, headers=long).headers["X-Quipu-Request-Id"]

        def ask(count: int) -> list[str]:
            with ThreadPoolExecutor(8) as threads:
                return list(threads.map(ask_one, range(count)))

        seen = ask(1)
        run(database, tmp_path)
        (first,) = (tmp_path / "data" / "ledger").glob("*.wal")
        seen += ask(120)  # more than a segment has room for
        eventually(lambda: not first.exists(), "the first segment is deleted")
        assert "bad" in run(folder, tmp_path, code=1)
        with streaming(server, token_prompt("open", 40), 4000):
            with streaming(server, token_prompt("ends", 40), 40) as ends:
                run(database, tmp_path)
                ends.read_all()
            seen += ask(2)
            assert "in order" in run(folder, tmp_path)
            missing = ask(1)
        receipt, keys = tmp_path / "receipt.json", tmp_path / "keys.json"
        receipt.write_bytes(server.get(f"/v1/usage/{seen[0]}/receipt").content)
        keys.write_bytes(server.get("/v1/usage/keys").content)
    written = records(tmp_path)
    assert "in order" in run(restore, tmp_path)
    with serving(tmp_path, *FLAGS, exit_code=0) as server:
        later = server.complete(token_prompt("tag", 40), 3).headers["X-Quipu-Request-Id"]
    restored = records(tmp_path)
    assert {*seen, later} < restored.keys() and not set(missing) & restored.keys()
    assert all(restored[one] == written[one] for one in seen)
    assert [one["recovered"] for one in restored.values()].count(True) == 1  # the stream that was open
    assert ledger(tmp_path, "verify").stdout.startswith("in order")
    assert ledger(tmp_path, "verify-receipt", str(receipt), "--keys", str(keys)).returncode == 0
