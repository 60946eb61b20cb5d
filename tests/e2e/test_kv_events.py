"""KV events of a whole server: a router's view of the cache over sockets, across an engine restart."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import closing
from pathlib import Path

from tests.e2e.servers import BLOCK, Server, eventually, run_quipu, serve_command, serving
from tests.kv_mirror import Subscriber
from tests.processes import free_ports


def has_zmq(pid: int) -> bool:
    return "zmq" in Path(f"/proc/{pid}/maps").read_text()


def test_subscriber_follows_cache(tmp_path: Path) -> None:
    """A subscriber sees the blocks of prompt and output and, after the engine's death, those of the next engine."""
    live, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    flag = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": live, "replay_endpoint": replay}
    folder = tmp_path / "server"
    with serving(folder, "--executor", "fake", "--kv-events-config", json.dumps(flag)) as server:
        (opened,) = eventually(lambda: server.events("kv_events.open"), "it is logged")
        assert (opened["endpoint"], opened["replay_endpoint"], opened["level"]) == (live, replay, "info")
        assert server.get("/server_info").json()["settings"]["kv_events_endpoint"] == live
        with closing(Subscriber(live, replay, BLOCK)) as subscriber:
            prompt = list(range(300, 350))
            answer = server.complete(prompt, max_tokens=30).json()
            assert answer["usage"]["completion_tokens"] == 30
            mirror = subscriber.mirror

            def ask(tokens: list[int]) -> None:
                server.complete(tokens, max_tokens=1)

            # events from before the subscription are replayed when another event arrives
            turns = iter(range(1000, 2000))
            subscriber.receive_while(lambda: mirror.prefix_of(prompt) < 48, lambda: ask([next(turns)] * (BLOCK + 1)))
            mirror.check(None)
            num_blocks = (50 + 30 - 1) // BLOCK
            assert sum(parent is not None for parent, _ in mirror.blocks.values()) == num_blocks - 1, "outputs, too"

            server.post("/reset_prefix_cache")
            ask(list(range(400, 420)))
            subscriber.receive_while(lambda: mirror.prefix_of(list(range(400, 420))) == 0)
            assert mirror.prefix_of(prompt) == 0 and len(mirror.blocks) == 1

            os.kill(server.engine_pid(), signal.SIGKILL)
            eventually(lambda: len(server.events("kv_events.open")) == 2, "the next engine opens its sockets")
            server.wait_ready()
            subscriber.receive_while(lambda: subscriber.num_restarts == 0, lambda: ask([next(turns)] * (BLOCK + 1)))
            assert subscriber.replay(0)[0].events == [{"type": "AllBlocksCleared"}]
            assert mirror.prefix_of(list(range(400, 420))) == 0


def test_address_in_use(tmp_path: Path) -> None:
    """A server that cannot bind the configured address exits with an error that says why."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flag = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{taken.getsockname()[1]}"}
        serve = serve_command("--executor", "fake", "--port", "0", "--kv-events-config", json.dumps(flag))
        ended = run_quipu(*serve, folder=tmp_path)
    assert ended.returncode == 1
    assert f"quipu: KV events: cannot bind {flag['endpoint']}: Address already in use" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_off_by_default(fake: Server) -> None:
    """Without the setting, zmq is not even loaded."""
    assert not has_zmq(fake.pid) and not has_zmq(fake.engine_pid())
