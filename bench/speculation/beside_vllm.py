"""Compare what drafts are worth with what vLLM's are: the demo model served by both, with and without, by turns.

The demo model is small, so that most of a step is what a server does around it. What a step with drafts costs in a
larger shape is in the other rows of `python -m bench.speculation`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

from bench.peers.servers import PEERS, Peer, PeerFailed, Server, serve_quipu
from quipu.actors.shared.checkpoint import DEMO

from .demo_texts import COSTS, measure_text

NGRAM = {"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_max": 16}
"""As many drafts, of matches as long, as ours has by default."""
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SERVERS = ("quipu", "vllm")
FREE_TEXTS = ("copy_editing", "agent_transcripts", "json_sets")
"""Those that are asked of every server in the same words."""
BY_NAME = {peer.name: peer for peer in PEERS}


@attrs.frozen
class Beside:
    """One kind of text, asked of one server."""

    server: str
    text: str
    tokens_a_pass: float
    num_plain_a_s: float
    """Tokens a second without drafts, one request at a time."""
    ratio: float
    """Tokens a second with drafts, divided by those without: the median of rounds."""


def pairs() -> dict[str, tuple[Peer, Peer]]:
    """Return each server without drafts and with them."""

    def ours(speculative: str) -> Peer:
        flags = ("--speculative", speculative, "--speculative-costs", COSTS, "--executor", "cpu")
        return attrs.evolve(BY_NAME["quipu"], command=lambda *where: [*serve_quipu(*where), *flags])

    def theirs(*flags: str) -> Peer:
        vllm = BY_NAME["vllm"]
        return attrs.evolve(vllm, command=lambda *where: [*vllm.command(*where), *TOOLS, *flags])

    return {
        "quipu": (ours("off"), ours("suffix")),
        "vllm": (theirs(), theirs("--speculative-config", json.dumps(NGRAM))),
    }


def compare(names: Iterable[str], num_cases: int, num_rounds: int, servers: Sequence[str]) -> list[Beside]:
    """Ask each server without and with drafts by turns, while all others are paused. Raises PeerFailed."""
    found: list[Beside] = []
    for server in servers:
        with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
            running = []
            for at, peer in enumerate(pairs()[server]):
                if not peer.is_installed():
                    raise PeerFailed(f"{server} is not installed: {peer.install}")
                running.append(Server(peer, DEMO, Path(made) / f"{at}.log"))
                stack.callback(running[-1].stop)
                running[-1].wait()
            found += [_compare(server, name, running, num_cases, num_rounds) for name in names]
    return found


def _compare(server: str, name: str, running: Sequence[Server], num_cases: int, num_rounds: int) -> Beside:
    plain, ratios, found = [], [], []
    for at in range(num_rounds + 1):  # the first one is not counted: kernels are compiled
        rate = {}
        # others each time: what a server has said before is too easy to guess
        cases = range(at * num_cases, (at + 1) * num_cases)
        for which in (0, 1) if at % 2 else (1, 0):
            running[1 - which].pause()
            running[which].resume()
            started = time.perf_counter()
            one = measure_text(f"http://127.0.0.1:{running[which].port}", name, cases, server)
            rate[which] = one.num_tokens / (time.perf_counter() - started)
            if which and at:
                found.append(one)
        if at:
            plain.append(rate[0])
            ratios.append(rate[1] / rate[0])
    running[0].resume()
    num_tokens = sum(one.num_tokens for one in found)
    num_passes = num_tokens - sum(one.num_accepted for one in found)
    return Beside(server, name, num_tokens / max(1, num_passes), statistics.median(plain), statistics.median(ratios))
