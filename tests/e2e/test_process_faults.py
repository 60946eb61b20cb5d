"""Failures of a step, of the engine process and of the web process, and what their clients see."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from quipu.actors.fleet.processes.connected_host import CLOSED
from tests.e2e.ledger_command import ledger
from tests.e2e.prompts import expected_text, token_prompt
from tests.e2e.servers import Server, eventually, has_ended, serve_command, serving, start_quipu
from tests.e2e.streams import streaming
from tests.processes import PATIENCE_S
from tests.tiny import TINY

POISON = 299
LONG = 4000
"""More output tokens than a test waits for."""


def assert_serves(server: Server, tag: str) -> None:
    """Assert that a new request gets the correct output and that nothing of other requests is left."""
    prompt = token_prompt(tag, 20)
    answer = server.complete(prompt)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected_text(prompt, 8)
    metrics = server.wait_at_rest()
    assert metrics["usage_disputed_total"] == 0
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0


def test_step_that_raises(tmp_path: Path) -> None:
    """A request that makes steps raise fails alone, with the reason; those that share its steps are served correctly.

    At most four sequences run: three, and a fourth that disconnects and so admits the poisoned request while the others
    still wait. Since steps are sent ahead, the next step is already sent when the poisoned one raises.
    """
    flags = ["--executor", "fake", "--fake-poison-token-id", str(POISON), "--max-num-seqs", "4"]
    waiting = [token_prompt(f"waiting {index}", 30 + 5 * index) for index in range(6)]
    with serving(tmp_path, *flags) as server, ThreadPoolExecutor(10) as pool, ExitStack() as others:
        three = [others.enter_context(streaming(server, token_prompt(f"one of {i}", 50), LONG)) for i in range(3)]
        with streaming(server, token_prompt("leaves", 20), LONG):
            poisoned = pool.submit(server.complete, [*token_prompt("poison", 20), POISON])
            eventually(lambda: server.metrics()["num_requests_waiting"] == 1, "the poisoned request is waiting")
            served = [pool.submit(server.complete, prompt, max_tokens=20) for prompt in waiting]
            eventually(lambda: server.metrics()["num_requests_waiting"] == 7, "six more are waiting")
        refused = poisoned.result()
        assert refused.status_code == 500 and "poisoned token" in refused.json()["error"]["message"]
        for index, stream in enumerate(three):
            expected = expected_text(token_prompt(f"one of {index}", 50), 400)
            while len(stream.text) < len(expected):
                stream.read_some()
            assert stream.error is None and stream.text.startswith(expected)
        others.close()
        for prompt, future in zip(waiting, served, strict=True):
            answer = future.result().json()
            assert answer["choices"][0]["text"] == expected_text(prompt, 20)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        metrics = server.wait_at_rest()
        assert metrics['requests_total{outcome="failed"}'] == 1
        assert metrics['requests_total{outcome="finished"}'] == 6
        assert metrics['requests_total{outcome="cancelled"}'] == 4
        # the prompt of a stream that ran before the fault is still cached, with correct contents
        again = server.complete(token_prompt("one of 0", 50)).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        assert again["choices"][0]["text"] == expected_text(token_prompt("one of 0", 50), 8)
        assert server.get("/health").json()["incarnation"] == 1
        assert_serves(server, "after the fault")


def refusing_probes(server: Server) -> list[httpx.Response]:
    """Wait until /health and /ready are both 503, and return these responses.

    An engine that is forked takes the place of a dead one within tenths of a second.
    """

    def look() -> list[httpx.Response] | None:
        probes = [server.get("/health"), server.get("/ready")]
        return probes if all(probe.status_code == 503 for probe in probes) else None

    seen = eventually(look, "/health and /ready answer 503", most_pause_s=0.005)
    assert seen is not None
    return seen


def test_engine_killed(tmp_path: Path) -> None:
    """Open requests continue where they were; probes return 503 until the restart and 200 afterwards."""
    with serving(tmp_path, "--executor", "fake", "--fake-step-seconds", "0.01") as server:
        prompt = token_prompt("killed", 40)
        num_tokens = 120
        first_engine = server.engine_pid()
        num_blocks = server.metrics()['kv_blocks{state="free"}']  # known before any step
        with (
            ThreadPoolExecutor(1) as pool,
            streaming(server, prompt, num_tokens) as first,
            streaming(server, prompt, num_tokens) as second,
        ):
            whole = pool.submit(server.complete, token_prompt("whole", 30), max_tokens=num_tokens)
            eventually(lambda: server.metrics()["num_requests_running"] == 3, "three requests are running")
            os.kill(first_engine, signal.SIGKILL)
            health, ready = refusing_probes(server)
            for stream in (first, second):
                stream.read_all()
                assert stream.error is None and stream.done and stream.text == expected_text(prompt, num_tokens)
            assert whole.result().json()["choices"][0]["text"] == expected_text(token_prompt("whole", 30), num_tokens)
        assert "Retry-After" in health.headers and health.json()["state"] == "restarting"
        (death,) = eventually(lambda: server.events("engine.died"), "the death is logged")
        assert "SIGKILL" in death["reason"]
        assert ready.json()["detail"] in {CLOSED, death["reason"]}  # how it ended is known a moment later
        metrics = server.wait_at_rest()  # must hold even before another request updates the gauges
        assert metrics['requests_total{outcome="finished"}'] == 3 and metrics["usage_disputed_total"] == 0
        assert metrics['requests_resumed_total{same_numerics="true"}'] == 3 and metrics["engine_deaths_total"] == 1
        assert 0 < metrics["data_dir_free_bytes"] < metrics["data_dir_size_bytes"]
        assert metrics['kv_blocks{state="free"}'] + metrics['kv_blocks{state="cached"}'] == num_blocks > 0
        healthy = server.get("/health")
        assert healthy.status_code == 200 and healthy.json()["incarnation"] == 2
        assert server.engine_pid() != first_engine
        assert_serves(server, "after the restart")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [([], "no message for 8 seconds"), (["--step-timeout", "1"], "step 1 took longer than 1 seconds")],
    ids=["stopped", "in a step"],
)
def test_engine_hangs(tmp_path: Path, flags: list[str], reason: str) -> None:
    """An engine that is stopped, or whose step does not end, is killed, and a new engine serves."""
    step_seconds = "3600" if flags else "0.01"
    flags = [*flags, "--on-engine-death", "fail"]
    with serving(tmp_path, "--executor", "fake", "--fake-step-seconds", step_seconds, *flags) as server:
        first_engine = server.engine_pid()
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(server.complete, token_prompt("hung", 40), max_tokens=LONG)
            eventually(lambda: server.metrics()["open_accounts"] == 1, "a request is running")
            if step_seconds != "3600":
                os.kill(first_engine, signal.SIGSTOP)
            health, _ = refusing_probes(server)
            answer = whole.result()
        assert answer.status_code == 500 and reason in answer.json()["error"]["message"]
        assert health.json()["state"] == "restarting" and reason in health.json()["detail"]
        eventually(lambda: has_ended(first_engine), "it is killed, at the latest when it has not come back")
        server.wait_ready()
        assert server.get("/health").json()["incarnation"] == 2 and server.engine_pid() != first_engine
        metrics = server.wait_at_rest()
        assert metrics['requests_total{outcome="failed"}'] == 1 and metrics["usage_disputed_total"] == 0
        if step_seconds != "3600":
            assert_serves(server, "after the restart")


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL], ids=["continued", "killed"])
def test_deadlines_while_engine_hangs(tmp_path: Path, end: signal.Signals) -> None:
    """64 streams of a stopped engine end with an error at their deadline; each then has exactly one record."""
    flags = ["--executor", "fake", "--fake-step-seconds", "0.01", "--request-timeout", "6"]
    with serving(tmp_path / "server", *flags) as server, ThreadPoolExecutor(65) as pool:
        engine = server.engine_pid()
        began_s = time.monotonic()
        open_streams: list[int] = []

        def ask(index: int) -> float:
            with streaming(server, token_prompt(f"late {index}", 20 + index), LONG) as stream:
                open_streams.append(index)
                stream.read_all()
            assert stream.error is not None and "longer than 6 seconds" in stream.error["message"]
            return time.monotonic()

        streams = [pool.submit(ask, index) for index in range(64)]
        eventually(lambda: len(open_streams) == 64, "all streams have started")
        os.kill(engine, signal.SIGSTOP)
        late_request = pool.submit(server.complete, token_prompt("came later", 20))
        assert all(stream.result() >= began_s + 6 for stream in streams)
        assert late_request.result().status_code == 504
        assert server.metrics()["open_accounts"] == 65
        os.kill(engine, end)
        metrics = server.wait_at_rest()
        assert metrics["usage_disputed_total"] == 0
        assert server.stop() == 0
    exported = [
        json.loads(line) for line in ledger(tmp_path / "server", "export", "--format", "jsonl").stdout.splitlines()
    ]
    records = [record for record in exported if record["prompt_tokens"]]
    assert len(records) >= 64 and len({record["request_id"] for record in exported}) == len(exported) == 65
    assert all(record["outcome"] == "failed" and not record["disputed"] for record in records)


def test_engine_keeps_dying(tmp_path: Path) -> None:
    """After too many engine deaths within the window the server exits with an error."""
    with serving(tmp_path, "--executor", "fake") as server:
        killed = 0
        while server.process.poll() is None:
            engines = eventually(
                lambda: server.engines() or server.process.poll() is not None, "an engine is started or the server ends"
            )
            for pid in engines if isinstance(engines, list) else ():
                os.kill(pid, signal.SIGKILL)
                eventually(lambda pid=pid: has_ended(pid), "the engine is dead")
                killed += 1
        assert server.process.returncode == 1
        assert len(server.events("engine.died")) == killed == 6
        assert "the engine is given up: killed by SIGKILL" in server.log_text


def test_checkpoint_cut_off_while_in_use(tmp_path: Path) -> None:
    """An engine that dies of SIGBUS is restarted while its files are whole; with one that is cut off the server ends,
    and names it."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(TINY, checkpoint)
    flags = [str(checkpoint), "--served-model-name", "demo", "--executor", "fake"]
    with serving(tmp_path / "server", *flags) as server:
        os.kill(server.engine_pid(), signal.SIGBUS)
        eventually(lambda: server.events("engine.died"), "the engine is dead")
        server.wait_ready()
        assert_serves(server, "after the first")
        os.truncate(checkpoint / "model.safetensors", 5000)
        os.kill(server.engine_pid(), signal.SIGBUS)
        assert server.process.wait(PATIENCE_S) == 1
        first, second = [event["reason"] for event in server.events("engine.died")]
        assert "SIGBUS" in first and "cut off" not in first
        assert "model.safetensors is cut off: it has 5000 bytes" in second
        assert second in server.log_text.splitlines()[-1]


def test_web_process_killed(tmp_path: Path) -> None:
    """The engine notices that its socket is closed, and exits, even while it is working."""
    with serving(tmp_path, "--executor", "fake") as server:
        engine = server.engine_pid()
        with ExitStack() as clients:
            clients.enter_context(streaming(server, token_prompt("orphan", 40), LONG))
            server.process.kill()
            server.process.wait()
            eventually(lambda: has_ended(engine), "the engine ends without its web process")


def test_web_process_killed_during_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine also exits while it still imports torch and does not read its socket yet."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "torch.py").write_text("import time; time.sleep(600)")  # longer than the test waits
    monkeypatch.setenv("PYTHONPATH", str(modules))
    process, log_path = start_quipu(tmp_path / "server", *serve_command("--port", "0"))
    server = Server(process, log_path)
    try:
        engine = server.engine_pid()
        threads = Path(f"/proc/{engine}/task")
        eventually(lambda: len(list(threads.iterdir())) > 1, "the engine watches its parent")
        assert not server.events("engine.ready")
    finally:
        process.kill()
        process.wait()
    eventually(lambda: has_ended(engine), "the engine ends without its web process")
