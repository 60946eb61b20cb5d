"""The peers' benchmark: its load generator, thin server, checkpoint and arithmetic."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
from tokenizers import Tokenizer

from bench.http_load import Answer, EventCounter, LoadFailed, ask_all, completion, decode_rate
from bench.peers.__main__ import Load, best_of, compare, decode, measure, render
from bench.peers.checkpoint import SHAPE, make_tokenizer, make_weights
from bench.peers.servers import PEERS, PeerFailed, Server
from bench.peers.thin_server import run_engine, serve
from bench.peers.traced import prompt_of
from bench.trace_replay import QUICK_TRACE
from tests.processes import eventually, free_ports
from tests.tiny import TINY

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def event(text: str = "", finish_reason: str | None = None, **more: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"text": text, "finish_reason": finish_reason}], **more}).encode()


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_in_arbitrary_pieces(size: int) -> None:
    """Tokens without text count; comments, usage and an empty last chunk do not."""
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
    stream = (
        HEAD + event("a") + b": ping\n\n" + event() + event("b") + event("", "length") + usage + b"data: [DONE]\n\n"
    )
    counter = EventCounter()
    assert sum(counter.feed(stream[at : at + size]) for at in range(0, len(stream), size)) == 3
    assert counter.is_done


def test_failed_responses() -> None:
    """An error status, or an error in mid-stream, is a failure that quotes the response."""
    with pytest.raises(LoadFailed, match="too long"):
        EventCounter().feed(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b'{"error": "too long"}')
    with pytest.raises(LoadFailed, match="engine died"):
        EventCounter().feed(HEAD + b'data: {"error": {"message": "engine died"}}\n\n')


def test_decode_rate() -> None:
    """Only tokens count that arrive while every stream decodes: not those before a slow first token or after an end."""
    early = Answer(0.0, tuple(0.1 * i for i in range(1, 41)))
    late = Answer(0.0, tuple(2.0 + 0.1 * i for i in range(41)))
    assert decode_rate([early, late]) == pytest.approx(20, rel=0.05)
    assert decode_rate([early]) == pytest.approx(10)
    with pytest.raises(LoadFailed, match="never decoded at the same time"):
        decode_rate([early, Answer(0.0, (5.0, 5.1))])


@pytest.mark.parametrize(("together_at", "asked"), [(8, [8]), (32, [8, 16, 32]), (64, [8, 16, 32, 64])])
def test_outputs_double_until_streams_decode_together(
    together_at: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate is that of the first outputs that overlap; times to first token are those of the first answers."""
    seen: list[int] = []

    def scripted(port: int, bodies: list[dict[str, Any]]) -> list[Answer]:
        seen.append(bodies[0]["max_tokens"])
        begin_s = float(len(seen))
        second_s = begin_s if seen[-1] >= together_at else begin_s + 100
        times = [tuple(first_s + 0.1 * number for number in range(11)) for first_s in (begin_s, second_s)]
        return [Answer(0.0, tokens_s) for tokens_s in times]

    monkeypatch.setattr("bench.peers.__main__.ask_all", scripted)
    rate, (first, _) = decode(1, [[5], [6]], 8)
    assert seen == asked
    assert rate == pytest.approx(20)
    assert first.first_token_s == 1.0


def test_streams_that_never_decode_together_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose streams never overlap fails, with a message that says so."""
    apart = [Answer(0.0, (1.0, 2.0)), Answer(0.0, (3.0, 4.0))]
    monkeypatch.setattr("bench.peers.__main__.ask_all", lambda *_: apart)
    with pytest.raises(LoadFailed, match="never decoded at the same time"):
        decode(1, [[5], [6]], 8)


class Counting:
    """An engine that generates n+1 after n; it serves one prompt at a time."""

    gather_s = 0.01
    step_s = 0.001
    info = {"kv": "none"}

    def __init__(self) -> None:
        self.open: dict[int, list[int]] = {}

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        self.open[number] = [prompt[-1], max_tokens]

    def step(self) -> list[tuple[int, int, bool]]:
        time.sleep(self.step_s)  # otherwise the client reads everything in one piece
        drawn = []
        for number, state in list(self.open.items()):
            state[0], state[1] = state[0] + 1, state[1] - 1
            drawn.append((number, state[0], state[1] == 0))
            if state[1] == 0:
                del self.open[number]
        return drawn


@contextmanager
def thin_server(port: int) -> Iterator[None]:
    """Run the server's two processes as threads."""
    front, engine = multiprocessing.Pipe()
    loop = asyncio.new_event_loop()
    serving = loop.create_task(serve(front, Counting.info, {5: "five"}, port))

    def compute() -> None:
        with suppress(EOFError):
            run_engine(Counting(), engine)

    def answer() -> None:
        loop.run_until_complete(asyncio.gather(serving, return_exceptions=True))

    threads = [threading.Thread(target=compute), threading.Thread(target=answer)]
    threads[0].start()
    assert front.recv() == Counting.info
    threads[1].start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        threads[1].join()
        loop.remove_reader(front.fileno())
        front.close()
        threads[0].join()
        engine.close()
        loop.close()


@pytest.fixture
def port() -> Iterator[int]:
    (number,) = free_ports(1)

    def listens() -> bool:
        try:
            socket.create_connection(("127.0.0.1", number)).close()
        except ConnectionRefusedError:
            return False
        return True

    with thin_server(number):
        eventually(listens, "the server listens")
        yield number


def test_thin_server(port: int) -> None:
    """Concurrent requests each get the requested number of their own tokens; `/info` describes the server."""
    answers = ask_all(port, [completion("m", [number, number + 1], 3 + number) for number in range(12)])
    assert [len(answer.tokens_s) for answer in answers] == [3 + number for number in range(12)]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/info") as response:
        assert json.load(response) == {"kv": "none"}


def test_every_row_is_measured(port: int) -> None:
    """One turn of a server yields every number of the report."""
    load = Load(concurrencies=(1, 4), output_tokens=50, long_prompt=128)
    numbers = measure(port, load, random.Random(1))
    assert numbers.keys() == load.rows().keys()
    assert all(value > 0 for value in numbers.values())


def test_best_and_ratio() -> None:
    """The highest rate and the shortest time count; ratios to the best peer are above 1 if quipu is faster."""
    units = {"decode_1": "tokens/s", "first": "ms"}
    ours = [{"decode_1": 10.0, "first": 30.0}, {"decode_1": 12.0, "first": 20.0}]
    assert best_of(ours, units) == {"decode_1": 12.0, "first": 20.0}
    peers: dict[str, list[dict[str, float]]] = {
        "slow": [{"decode_1": 4.0, "first": 80.0}],
        "fast": [{"decode_1": 5.0, "first": 60.0}, {"decode_1": 8.0, "first": 40.0}],
        "none": [],
    }
    rows = compare({"quipu": ours, **peers}, units)
    assert [(row["best_peer"], row["ratio"]) for row in rows] == [("fast", 1.5), ("fast", 2.0)]
    assert [row["paired"] for row in rows] == [1.75, 2.0]
    assert compare({"quipu": ours}, units)[0]["ratio"] is None
    report = {"rows": rows, "servers": dict.fromkeys(["quipu", "slow", "fast", "none"])}
    assert render(report).splitlines()[1].split()[-6:] == ["12.0", "4.0", "8.0", "-", "1.50", "1.75"]


def test_peers_not_installed(tmp_path: Path) -> None:
    """A peer whose environment or module is missing is not installed; each has a command that installs it."""
    assert not attrs.evolve(PEERS[1], python=tmp_path / "python").is_installed()
    assert not attrs.evolve(PEERS[1], needs="no_such_module").is_installed()
    assert PEERS[0].is_installed()
    assert all("pip install" in peer.install or peer.install.startswith("make ") for peer in PEERS)


def test_synthetic_tokenizer() -> None:
    """The tokenizer has the requested size, consecutive ids, and round-trips any text."""
    made = make_tokenizer(6000)
    tokenizer = Tokenizer.from_str(json.dumps(made))
    assert tokenizer.get_vocab_size() == 6000
    assert sorted(made["model"]["vocab"].values()) == list(range(6000))
    text = "It's a quipu, ünïcödé ✓ 12345\n\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    used = tokenizer.encode("preventing" * 50).ids
    assert used and max(used) < 6000


def test_random_weights() -> None:
    """The tensors have the real shape (596 million elements with 28 layers) and are the same in every run."""
    tiny = SHAPE | {
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "head_dim": 8,
    }
    first, again = dict(make_weights(tiny)), dict(make_weights(tiny))
    assert len(first) == 2 * 11 + 2
    assert all(first[name].equal(again[name]) for name in first)
    assert first["model.layers.0.mlp.up_proj.weight"].shape == (64, 32)
    assert not first["model.layers.0.mlp.up_proj.weight"].equal(first["model.layers.1.mlp.up_proj.weight"])


def test_dead_server(tmp_path: Path) -> None:
    """The error quotes the last line that the server printed."""
    peer = attrs.evolve(PEERS[1], command=lambda model, port: ["-c", f"print({model!r}); raise SystemExit('no AVX')"])
    server = Server(peer, Path("folder"), tmp_path / "log")
    with pytest.raises(PeerFailed, match="transformers has exited: no AVX"):
        server.wait()
    server.stop()


def test_each_server_has_data_of_its_own(tmp_path: Path) -> None:
    """Servers that run at the same time share no data folder, which the first would lock."""
    peer = attrs.evolve(PEERS[0], command=lambda *_: ["-c", "import sys; sys.exit(sys.argv[-1])"])
    folders = set()
    for name in ("one", "other"):
        server = Server(peer, TINY, tmp_path / f"{name}.log")
        with pytest.raises(PeerFailed, match=str(tmp_path)) as failed:
            server.wait()
        folders.add(str(failed.value).split()[-1])
    assert len(folders) == 2


@pytest.mark.slow
def test_paused_server(tmp_path: Path) -> None:
    """A paused server does not respond until it is resumed; `stop` ends it."""
    flags = ["--executor", "fake", "--log-level", "warning", "--served-model-name", "m"]
    peer = attrs.evolve(
        PEERS[0], command=lambda model, port: ["-m", "quipu.web.cli.cli", "serve", model, "--port", str(port), *flags]
    )
    server = Server(peer, TINY, tmp_path / "log")
    try:
        assert server.wait() == {"weights": "bfloat16", "kv": "bfloat16"}
        assert len(ask_all(server.port, [completion("m", [5, 6], 4)])[0].tokens_s) == 4
        server.pause()
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/ready", timeout=1)
        server.resume()
        assert len(ask_all(server.port, [completion("m", [5, 6], 4)])[0].tokens_s) == 4
    finally:
        server.stop()
    with pytest.raises(PeerFailed):
        server.check()


def test_traced_prompts_share_what_the_trace_shares() -> None:
    """Equal ids are equal blocks; the rest of a prompt is its own, and another salt shares nothing."""
    first, second, again = (prompt_of(request, "salt", 5000) for request in QUICK_TRACE)
    assert (len(first), len(second)) == (1100 // 16, 1500 // 16)
    assert first == again
    assert first[:64] == second[:64] and first[64:] != second[64:69]
    other = prompt_of(QUICK_TRACE[0], "pepper", 5000)
    assert other[:8] != first[:8]
