"""Compare what adapters cost quipu and vLLM over HTTP: streams with adapters beside streams without. See `adapters.py`.

Both serve the shape of Qwen3-0.6B with random weights and adapters, which change every linear layer. A server is asked
with none, 1, 4, 16 adapters among its streams, in an order that changes with every round, while the other is paused.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

from bench.http_load import ask_all, completion, decode_rate
from bench.peers.checkpoint import SHAPE, make_checkpoint
from bench.peers.servers import HOME, MODEL, PEERS, Peer, PeerFailed, Server

SERVERS = ("quipu", "vllm")
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
BY_NAME = {peer.name: peer for peer in PEERS}


@attrs.frozen
class Beside:
    server: str
    num_adapters: int
    num_plain_a_s: float
    """Tokens a second of all streams while none has an adapter: the median of rounds."""
    ratio: float
    """Tokens a second with adapters, divided by that: the median of rounds."""


def with_adapters(peer: Peer, folders: Sequence[Path], rank: int) -> Peer:
    """Return a server that loads these adapters when it starts, as `a0`, `a1` and so on."""
    # one more than are used: on CPUs, vLLM mistakes rows without an adapter for those of the last one otherwise
    flags = ["--enable-lora", "--max-loras", str(len(folders) + 1), "--max-lora-rank", str(rank)]
    flags += ["--lora-modules", *(f"a{index}={folder}" for index, folder in enumerate(folders))]
    return attrs.evolve(peer, command=lambda model, port: [*peer.command(model, port), *flags])


def compare_servers(
    servers: Sequence[str],
    counts: Sequence[int],
    num_streams: int,
    rank: int,
    num_rounds: int,
    save: Callable[[Path, int], None],
) -> list[Beside]:
    """`save` saves an adapter of random numbers in a folder. Raises PeerFailed and LoadFailed."""
    checkpoint = make_checkpoint(HOME / "qwen3-0.6b-random")
    rates: dict[tuple[str, int], list[float]] = {(name, count): [] for name in servers for count in (0, *counts)}
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folders = [Path(made, f"a{index}") for index in range(max(counts))]
        for index, folder in enumerate(folders):
            save(folder, index)
        running: dict[str, Server] = {}
        for name in servers:
            peer = with_adapters(BY_NAME[name], folders, rank)
            if not peer.is_installed():
                raise PeerFailed(f"{name} is not installed: {peer.install}")
            running[name] = Server(peer, checkpoint, Path(made, f"{name}.log"))
            stack.callback(running[name].stop)
            running[name].wait()
            running[name].pause()
        for at in range(num_rounds + 1):  # the first one is not counted
            for name, server in running.items():
                server.resume()
                for count in (0, *counts) if at % 2 else (*reversed(counts), 0):
                    models = [f"a{index % count}" if count else MODEL for index in range(num_streams)]
                    prompts = [draw.choices(range(1000, SHAPE["vocab_size"]), k=PROMPT_TOKENS) for _ in models]
                    asked = zip(models, prompts, strict=True)
                    answers = ask_all(server.port, [completion(*one, OUTPUT_TOKENS) for one in asked])
                    if at:
                        rates[name, count].append(decode_rate(answers))
                server.pause()
    found = []
    for (name, count), some in rates.items():
        if count:
            ratios = [rate / plain for rate, plain in zip(some, rates[name, 0], strict=True)]
            found.append(Beside(name, count, statistics.median(rates[name, 0]), statistics.median(ratios)))
    return found
