"""What is stored outlives the server: restarts, `kill -9`, and the bytes that must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.servers import Server, eventually, run_quipu, serve_command, serving

FLAGS = ("--executor", "fake", "--fake-step-seconds", "0.02", "--response-store", "1h")
PATH = "/v1/responses"


def create(server: Server, **fields: Any) -> Any:
    body = {"model": "demo", "input": "A question.", "max_output_tokens": 4, "ignore_eos": True, **fields}
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stored_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / "data").glob("responses.sqlite3*")))


def test_restart_and_kill(tmp_path: Path) -> None:
    """Responses are there after `kill -9`; one that was being generated has failed, and its record says why; what was
    deleted is in no file.
    """
    home = tmp_path / "home"
    with serving(home, *FLAGS) as server:
        kept = create(server)
        gone = create(server, input="this must not be found again")
        assert server.get(f"{PATH}/{gone['id']}").json() == gone
        assert b"this must not be found again" in stored_bytes(home)
        assert httpx.delete(f"{server.url}{PATH}/{gone['id']}").status_code == 200
        assert b"this must not be found again" not in stored_bytes(home)
        lost = create(server, background=True, stream=False, max_output_tokens=900)
        eventually(lambda: server.get(f"{PATH}/{lost['id']}").json()["status"] == "in_progress", "it has begun")
        server.process.kill()
        server.process.wait()
    with serving(home, *FLAGS) as server:
        assert server.get(f"{PATH}/{kept['id']}").json() == kept
        failed = server.get(f"{PATH}/{lost['id']}").json()
        assert failed["status"] == "failed" and failed["usage"] is None and failed["output"] == []
        assert failed["error"]["code"] == "server_error" and "stopped before" in failed["error"]["message"]
        name = lost["id"].removeprefix("resp_")
        record = eventually(lambda: _found(server, name), "its record is in the ledger")
        assert record["outcome"] == "failed" and record["fault"] == "recovered"
        (recovered,) = eventually(lambda: server.events("response_store.recovered"), "it is logged")
        assert recovered["num_responses"] == 1
        chained = create(server, previous_response_id=kept["id"], input="And then?")
        assert chained["usage"]["input_tokens"] > kept["usage"]["input_tokens"]
        running = create(server, background=True, max_output_tokens=20)
    with serving(home, *FLAGS) as server:
        ended = server.get(f"{PATH}/{running['id']}").json()
        assert ended["status"] == "incomplete" and ended["usage"]["output_tokens"] == 20, "the drain waited for it"
    modes = {path.stat().st_mode & 0o777 for path in (home / "data").glob("responses.sqlite3*")}
    assert modes == {0o600}


def _found(server: Server, name: str) -> Any:
    answer = server.get(f"/v1/usage/{name}")
    return answer.json() if answer.status_code == 200 else None


@pytest.mark.parametrize(("flag", "value"), [("--response-store", "soon"), ("--response-store-bytes", "5")])
def test_bad_flags(tmp_path: Path, flag: str, value: str) -> None:
    """A time or a size that cannot be is refused at the start."""
    ended = run_quipu("serve", "demo", flag, value, folder=tmp_path)
    assert ended.returncode == 2 and flag in ended.stderr


def test_damaged_file(tmp_path: Path) -> None:
    """A file that is no database keeps the server from starting, with what to do."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "responses.sqlite3").write_bytes(b"x" * 10_000)
    ended = run_quipu(*serve_command(*FLAGS), "--port", "0", folder=tmp_path)
    assert ended.returncode == 1 and "Move it away" in ended.stderr
