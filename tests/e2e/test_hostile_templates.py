"""A checkpoint with a hostile chat template: its chats get a 400 in time, and other requests are not affected."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.servers import PATIENCE_S, Server, eventually, has_ended, serve_command, serving, start_quipu
from tests.tiny import TINY

TEMPLATE = (
    "{% set said = messages[0].content %}"
    "{% if said == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if said == 'power' %}{{ (messages | length + 10) ** (messages | length + 99999999) }}{% endif %}"
    "{% if said == 'long' %}{{ 'a' * (10 ** 11 * messages | length) }}{% endif %}"
    "{% if said == 'endless' %}{% for a in range(99999) %}{% for b in range(99999) %}{{ 'a' * 4000 }}{% endfor %}"
    "{% endfor %}{% endif %}"
    "{% macro again() %}{{ again() }}{% endmacro %}{% if said == 'recursion' %}{{ again() }}{% endif %}"
    "{% if said == 'zero' %}{{ 1 / (messages | length - 1) }}{% endif %}"
    "{{ said }}"
)
TIMEOUT_S = 3.0
"""Long enough for a harmless chat on a busy machine."""


def checkpoint(folder: Path, template: str) -> str:
    """Copy the tiny model with another template."""
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def ask(server: Server, content: str) -> httpx.Response:
    body = {"model": "hostile", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return server.post("/v1/chat/completions", body)


def test_endless_templates(tmp_path: Path) -> None:
    """Each gets a 400 that names the field; other requests are answered meanwhile, and no process stays busy."""
    model = checkpoint(tmp_path / "hostile", TEMPLATE)
    flags = (model, "--executor", "fake", "--chat-template-timeout", str(TIMEOUT_S))
    with serving(tmp_path / "server", *flags) as server:
        answers: dict[str, httpx.Response] = {}
        bad = ("loop", "power", "long", "endless", "recursion", "zero")

        def ask_hostile(content: str) -> None:
            answers[content] = ask(server, content)

        threads = [threading.Thread(target=ask_hostile, args=(content,)) for content in bad]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert ask(server, "hello").status_code == 200
            assert server.get("/health").status_code == 200
        for content in bad:
            error = answers[content].json()["error"]
            assert answers[content].status_code == 400 and error["param"] == "messages", content
        assert answers["endless"].json()["error"]["code"] == "context_length_exceeded"
        assert f"{TIMEOUT_S:g} seconds" in answers["loop"].json()["error"]["message"]
        eventually(lambda: not any(map(is_busy, server.chat_workers())), "no worker is busy")
        server.wait_at_rest()
        workers = server.chat_workers()
    for pid in workers:
        eventually(lambda pid=pid: has_ended(pid), "the server's workers end with it")


def test_unprintable_values(fake: Server) -> None:
    """Lone surrogates in arguments are text as they came; inputs nested nearly to the limit for JSON get a 400."""
    output = {"type": "function_call_output", "call_id": "1", "output": "y"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a":"\\ud800"}'}
    fields = {"model": "demo", "max_output_tokens": 1, "input": [{"role": "user", "content": "x"}, call, output]}
    answer = fake.post("/v1/responses", fields)
    assert answer.status_code == 200
    deep = '{"a":' * 990 + "1" + "}" * 990
    turns = [
        '{"role":"user","content":"x"}',
        '{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":' + deep + "}]}",
        '{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":"y"}]}',
    ]
    body = '{"model":"demo","max_tokens":1,"messages":[' + ",".join(turns) + "]}"
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{fake.url}/v1/messages", content=body, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def is_busy(pid: int) -> bool:
    """Return whether a process is using the processor."""
    try:
        before = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
        time.sleep(0.05)
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) - int(before) > 20_000_000
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_invalid_template(tmp_path: Path) -> None:
    """A server whose chat template does not compile reports it and exits."""
    model = checkpoint(tmp_path / "hostile", "{% if %}")
    flags = ("--port", "0", "--executor", "fake", "--chat-template-timeout", "0.5")
    process, log_path = start_quipu(tmp_path / "server", *serve_command(model, *flags))
    try:
        assert process.wait(PATIENCE_S) == 1
    finally:
        process.kill()
        process.wait()
    log = log_path.read_text()
    assert "the chat template does not compile" in log and "Traceback" not in log


def test_killed_server_leaves_no_worker(tmp_path: Path) -> None:
    """Workers end with a killed web process, even one that renders endlessly."""
    model = checkpoint(tmp_path / "hostile", TEMPLATE)
    with serving(tmp_path / "server", model, "--executor", "fake", "--chat-template-timeout", "600") as server:
        idle = set(eventually(server.chat_workers, "a worker is idle"))

        def ask_until_killed() -> None:
            with pytest.raises(httpx.HTTPError):
                ask(server, "loop")

        thread = threading.Thread(target=ask_until_killed)
        thread.start()
        eventually(lambda: set(server.chat_workers()) - idle, "one is busy and another was started")
        workers = server.chat_workers()
        server.process.kill()
        server.process.wait()
        thread.join()
        for pid in workers:
            eventually(lambda pid=pid: has_ended(pid), "a worker ends with its server")
