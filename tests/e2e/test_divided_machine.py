"""Real engine processes of one server divide the machine: processors, threads, memory, addresses of KV events."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from quipu.actors.fleet.engine_shares import EngineShares
from quipu.actors.fleet.machine_parts import available_memory, read_machine
from quipu.actors.fleet.processes.process_host import ProcessHost
from quipu.actors.fleet.supervisor import EngineRefusal
from quipu.actors.text_workers.renderer import InlineRenderer
from tests.e2e.servers import Server, eventually, run_quipu, serve_command, serving
from tests.e2e.spare_processes import STARTS_ANEW
from tests.processes import PATIENCE_S
from tests.runtimes import open_with_kept_vocabulary, runtime_config, serving_info
from tests.tiny import TINY

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be divided")
PROMPT = list(range(300, 350))


def cpus_of(pid: int) -> set[int]:
    """Return the CPUs that the threads of a process may run on; they must all be the same."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has ended
            found.add(frozenset(os.sched_getaffinity(int(task.name))))
    (cpus,) = found
    return set(cpus)


def threads_of(pid: int) -> int:
    """Return the number of threads that a process was told to use."""
    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    (number,) = (line.partition("=")[2] for line in lines if line.startswith("OMP_NUM_THREADS="))
    return int(number)


def wait_engines(server: Server, *engine_ids: int) -> None:
    """Wait until exactly these engines exist and are ready."""

    def ready() -> bool:
        engines = server.get("/v1/admin/engines").json()["engines"]
        return [(its["id"], its["state"]) for its in engines] == [(number, "ready") for number in engine_ids]

    eventually(ready, f"engines {engine_ids} are ready")


def engine_pids(server: Server) -> dict[int, int]:
    """Return the pid of each engine, by the KV events file that it was told to bind."""
    pids = {}
    for pid in server.engines():
        command = Path(f"/proc/{pid}/cmdline").read_text()
        number = command.partition("/events_dp")[2].partition('"')[0]
        pids[int(number or 0)] = pid
    return pids


def last_ready(server: Server) -> dict[int, dict[str, Any]]:
    """Return what each engine reported when it was last ready."""
    return {record["engine_id"]: record for record in server.events("engine.ready")}


@needs_two_cpus
def test_two_engines_divide_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine has its own CPUs and memory, keeps them after a restart, and leaves them to a later engine."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv(STARTS_ANEW, "1")
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    budget = 2_000_000_000
    flags = ["--engines", "2", "--executor", "cpu", "--gpu-memory-utilization", f"{budget / total:.6f}"]
    flags += ["--kv-events-config", f'{{"enable_kv_cache_events": true, "endpoint": "ipc://{tmp_path}/events"}}']
    everything = os.sched_getaffinity(0)
    with serving(tmp_path / "two", *flags) as server:
        wait_engines(server, 0, 1)
        pids = engine_pids(server)
        first, second = cpus_of(pids[0]), cpus_of(pids[1])
        assert first and second and not first & second
        assert first | second == everything
        assert [threads_of(pids[0]), threads_of(pids[1])] == [len(first), len(second)]
        assert cpus_of(server.pid) == everything, "the web process is not pinned"
        eventually(lambda: len(last_ready(server)) == 2, "both are logged")
        found = last_ready(server)
        held = sum(its["weights_bytes"] + its["kv_cache_bytes"] + its["workspace_bytes"] for its in found.values())
        assert budget / 2 < held <= budget
        assert found[0]["kv_cache_bytes"] == pytest.approx(found[1]["kv_cache_bytes"], rel=0.1)
        wanted = {f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/events_dp1"}
        eventually(
            lambda: {record["endpoint"] for record in server.events("kv_events.open")} == wanted,
            "both have logged their addresses",
        )
        assert server.complete(PROMPT).status_code == 200

        os.kill(pids[1], signal.SIGKILL)
        eventually(lambda: len(server.events("engine.ready")) == 3, "the second engine is back")
        again = engine_pids(server)
        assert again[1] != pids[1]
        assert cpus_of(again[1]) == second
        assert last_ready(server)[1]["kv_cache_bytes"] == pytest.approx(found[1]["kv_cache_bytes"], rel=0.1)

        # the third engine takes the share of the second, once that is gone
        assert httpx.delete(f"{server.url}/v1/admin/engines/1", timeout=PATIENCE_S).status_code == 202
        wait_engines(server, 0)
        assert server.post("/v1/admin/engines", {"count": 1}).status_code == 202
        wait_engines(server, 0, 2)
        assert cpus_of(engine_pids(server)[2]) == second


def test_caches_that_do_not_fit(tmp_path: Path) -> None:
    """A cache that fits once, but not once per engine, is refused at start, with exit code 1."""
    free = available_memory()
    assert free is not None
    flags = ["--engines", "2", "--executor", "reference", "--kv-cache-memory", str(int(free * 0.7))]
    ended = run_quipu(*serve_command(*flags), "--port", "0", folder=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "of memory is available for each of 2 engines (--engines): lower it" in ended.stderr


def test_kv_event_ports_too_close(tmp_path: Path) -> None:
    """Addresses that several engines would both bind are refused at start."""
    events = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
    flags = ["--engines", "2", "--executor", "fake", "--kv-events-config", events]
    ended = run_quipu(*serve_command(*flags), "--port", "0", folder=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "--engines 2: engines 0 and 1 would both bind tcp://*:5558" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_weights_that_do_not_fit(num_engines: int) -> None:
    """With memory for one and a half copies of the weights, one engine serves, and two are refused, naming the flag."""
    weights = 2 * (TINY / "model.safetensors").stat().st_size  # the reference holds them in float32
    config = runtime_config(executor="reference", dtype="float32", num_engines=num_engines)
    environment = dict(os.environ)
    shares = EngineShares(config, read_machine(environment), environment, lambda: int(1.5 * weights))

    def make_host(engine_id: int) -> ProcessHost:
        share = shares.take(engine_id)
        return ProcessHost(share.config, share.environment)

    with ExitStack() as stack:
        if num_engines > 1:
            refused = stack.enter_context(pytest.raises(ExceptionGroup))
        with trio.fail_after(PATIENCE_S):
            async with open_with_kept_vocabulary(
                config, serving_info(config), make_host, make_renderer=InlineRenderer
            ) as runtime:
                while not runtime.desk.health().is_ready:
                    await trio.sleep(0.01)
    if num_engines > 1:
        assert refused.group_contains(EngineRefusal, match=r"in each of 2 engines.*lower --engines")
