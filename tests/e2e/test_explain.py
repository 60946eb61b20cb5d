"""Explanations of a real server: over HTTP and by `quipu explain`, before and after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.prompts import text_prompt
from tests.e2e.servers import PATIENCE_S, Server, run_quipu, serving, write_keys

KEYS = {"acme": "sk-quipu-of-acme", "bolt": "sk-quipu-of-bolt", "ops": "sk-quipu-of-ops"}
FAKE = ("--executor", "fake", "--fake-step-seconds", "0.001")
NUMBERS = ("prompt_tokens", "cached_tokens", "restored_tokens", "recomputed_tokens", "lost_to_rounding")


def get(server: Server, request_id: str, tenant: str) -> httpx.Response:
    headers = {"x-api-key": KEYS[tenant]}
    return httpx.get(f"{server.url}/v1/cache/explain/{request_id}", headers=headers, timeout=PATIENCE_S)


def ask(server: Server, *texts: str) -> str:
    """Send a chat and return its request id."""
    messages = [{"role": ("system", "user")[index], "content": text} for index, text in enumerate(texts)]
    body = {"model": "demo", "messages": messages, "max_tokens": 3, "ignore_eos": True}
    headers = {"x-api-key": KEYS["acme"]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-quipu-request-id"]


def command(folder: Path, *arguments: str) -> Any:
    done = run_quipu("explain", "--json", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_explain_before_and_after_a_restart(tmp_path: Path) -> None:
    """The endpoint and the command give one answer; after a restart it has the same numbers, without blocks."""
    write_keys(tmp_path.with_name("keys.json"), **KEYS)
    flags = (*FAKE, "--key-file", str(tmp_path.with_name("keys.json")))
    with serving(tmp_path, *flags) as server:
        first = ask(server, text_prompt("system", 60), text_prompt("one", 30))
        second = ask(server, text_prompt("system", 60), text_prompt("two", 30))
        answer = get(server, second, "acme")
        assert answer.status_code == 200
        shown = answer.json()
        (prompt,) = shown["prompts"]
        assert shown["state"] == "closed" and prompt["cached_tokens"] > 0
        assert prompt["ended"]["reason"] == "diverged" and prompt["ended"]["message"] == 1
        assert prompt["ended"]["diverged_from"] == first
        assert [message["index"] for message in prompt["messages"]] == [0, 1, None]
        assert prompt["blocks"][-1]["end"] == prompt["messages"][-1]["end"] == prompt["prompt_tokens"]
        assert command(tmp_path, second, "--base-url", server.url, "--api-key", KEYS["acme"]) == shown
        told = run_quipu("explain", second, "--base-url", server.url, "--api-key", KEYS["acme"], folder=tmp_path).stdout
        cached, size = prompt["cached_tokens"], prompt["prompt_tokens"]
        assert f"Request {second} had {size} tokens in its prompt, of which {cached} (" in told
        assert f"token {prompt['ended']['token']}, in message 2 (user)." in told
        assert f"Request {first} continued differently there." in told
        assert "\n  message 2, user: " in told
        assert [get(server, name, "bolt").text for name in (second, "req-x")] == [get(server, "req-y", "acme").text] * 2
        record = httpx.get(
            f"{server.url}/v1/usage/{second}", headers={"x-api-key": KEYS["acme"]}, timeout=PATIENCE_S
        ).json()
        assert [record[name] for name in NUMBERS[:4]] == [prompt[name] for name in NUMBERS[:4]]
        unknown = run_quipu("explain", "req-x", "--base-url", server.url, "--api-key", KEYS["acme"], folder=tmp_path)
        assert (unknown.returncode, unknown.stderr) == (1, "quipu: No record exists for this request id.\n")
        refused = run_quipu("explain", second, "--base-url", server.url, "--api-key", "sk-x", folder=tmp_path)
        assert refused.returncode == 2 and "Incorrect API key" in refused.stderr
    offline = command(tmp_path, second, "--data-dir", "data")
    with serving(tmp_path, *flags) as server:
        after = get(server, second, "acme").json()
    assert after == offline
    (kept,) = after["prompts"]
    assert [kept[name] for name in NUMBERS] == [prompt[name] for name in NUMBERS]
    assert kept["blocks"] == kept["messages"] == kept["advice"] == []
    assert (kept["ended"]["reason"], kept["ended"]["token"]) == ("diverged", prompt["ended"]["token"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--base-url", "http://127.0.0.1:9"), "no answer from http://127.0.0.1:9"),
        (("--data-dir", "nowhere"), "there is no ledger in nowhere"),
    ],
)
def test_without_a_server(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    """Without a server or a ledger, the command says what is missing and exits with 2."""
    done = run_quipu("explain", "req-1", *flags, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and words in done.stderr
