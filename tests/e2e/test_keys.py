"""API keys in a real server: with the official client, with a key file that changes, and kept out of the log."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quipu.web.auth.key_file import hash_key
from tests.e2e.prompts import token_prompt
from tests.e2e.servers import PATIENCE_S, Server, eventually, serving, write_keys
from tests.e2e.streams import streaming

A, B, C, ADMIN = "sk-quipu-of-a", "sk-quipu-of-b", "sk-quipu-of-c", "sk-quipu-admin-of-ops"
FAKE = ("--executor", "fake", "--fake-step-seconds", "0.01", "--log-level", "debug")


def send_sighup(server: Server, event: str) -> dict[str, Any]:
    """Send SIGHUP, wait for `event` in the log and return it."""
    num_before = len(server.events(event))
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: len(server.events(event)) > num_before, f"{event} is logged")
    return server.events(event)[-1]


def status(server: Server, path: str, key: str | None) -> int:
    headers = {} if key is None else {"x-api-key": key}
    return httpx.get(server.url + path, headers=headers, timeout=PATIENCE_S).status_code


def assert_keys_not_logged(server: Server) -> None:
    for key in (A, B, C, ADMIN):
        assert key not in server.log_text and hash_key(key) not in server.log_text


def test_keys_by_flag_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The official client works with a valid key and is rejected otherwise; no child process inherits a key."""
    monkeypatch.setenv("QUIPU_API_KEY", A)
    monkeypatch.setenv("QUIPU_ADMIN_KEY", ADMIN)
    with serving(tmp_path, *FAKE, "--api-key", B) as server:
        for key in (A, B, ADMIN):
            with server.client(key) as good:
                answer = good.completions.create(model="demo", prompt="hello", max_tokens=4)
                assert answer.usage is not None and answer.usage.completion_tokens <= 4
        with server.client(C) as bad, pytest.raises(openai.AuthenticationError) as refused:
            bad.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}])
        assert refused.value.code == "invalid_api_key"
        assert [status(server, "/metrics", key) for key in (None, A, ADMIN)] == [401, 403, 200]
        assert [status(server, path, None) for path in ("/health", "/ready", "/ping", "/nothing")] == [
            200,
            200,
            401,
            401,
        ]
        environment = Path(f"/proc/{server.engine_pid()}/environ").read_bytes()
        assert A.encode() not in environment and ADMIN.encode() not in environment
        assert_keys_not_logged(server)


def test_sighup_reloads_keys(tmp_path: Path) -> None:
    """SIGHUP reloads the keys and running requests continue; a bad file changes nothing and is logged."""
    path = tmp_path.with_name("keys.json")
    write_keys(path, a=A, b=B, ops=ADMIN)
    with serving(tmp_path, *FAKE, "--key-file", str(path)) as server:
        assert [status(server, "/v1/models", key) for key in (A, B, C)] == [200, 200, 401]
        with streaming(server, token_prompt("goes on", 40), 200, api_key=A) as stream:
            with server.paused_engine():
                write_keys(path, b=B, c=C, ops=ADMIN)
                reloaded = send_sighup(server, "keys.reloaded")
                assert (reloaded["num_keys"], reloaded["num_admin_keys"], reloaded["key_file"]) == (3, 1, str(path))
                assert [status(server, "/v1/models", key) for key in (A, B, C)] == [401, 200, 200]
            stream.read_all()
            assert stream.finish_reason == "length" and stream.error is None
        path.write_text(json.dumps({"keys": [{"id": "x", "name": "x", "tenant": "x", "sha256": A}]}))
        failure = send_sighup(server, "keys.not_reloaded")
        assert "keys[0] (x): `sha256`" in failure["error"] and failure["level"] == "error"
        path.write_text('{"keys": ' + "[" * 200_000)
        assert "nested too deeply" in send_sighup(server, "keys.not_reloaded")["error"]
        path.unlink()
        assert "cannot be read" in send_sighup(server, "keys.not_reloaded")["error"]
        assert [status(server, "/v1/models", key) for key in (A, B, C)] == [401, 200, 200]
        info = httpx.get(f"{server.url}/server_info", headers={"x-api-key": ADMIN}, timeout=PATIENCE_S)
        assert info.json()["keys"] == {"num_keys": 3, "num_admin_keys": 1, "key_file": str(path)}
        for key in (A, B, C, ADMIN):
            assert key not in info.text and hash_key(key) not in info.text
        assert_keys_not_logged(server)
