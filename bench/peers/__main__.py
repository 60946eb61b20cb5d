"""Compare quipu with its peers: the same checkpoint and the same load over HTTP, in alternation.

    python -m bench.peers [--json] [--quick] [--peers transformers vllm openvino llama.cpp] [--rounds 3]
        [--format bf16|int8|int4] [--activations float|int8]
        [--streams 1 8 32 64] [--output-tokens 128] [--longest-prompt 8192]

All serve one random checkpoint in the shape of Qwen3-0.6B (`bench/peers/checkpoint.py`), greedily, with outputs of
exactly the requested length. The servers run at the same time and take turns, in an order that changes with every
round; all but one are stopped (SIGSTOP). A number is the best of the rounds, since other load on the machine can only
make it worse. Some machines are faster for a few seconds, which may favor one server: `ratio` compares the best rounds,
`paired` is the median of the ratios of each round. Rows:

    decode_N               tokens per second of N streams together, while all of them decode (prompts of 64 tokens)
    prefill_1024           prompt tokens per second until the first token of a new prompt of 1,024 tokens
    first_token_warm_1024  milliseconds to the first token of a prompt of 1,024 tokens that was just served
    decode_1_at_8192       as decode_1, after a prompt of 8,192 tokens (`--longest-prompt`)
    prefill_8192           as prefill_1024, of one prompt

For a peer that is not installed the command that installs it is printed; for one that cannot run, the reason. If quipu
itself fails, the exit code is 1. The precision of weights, keys and values with each peer is part of the result: only
equal precisions do the same work.

With `--format int8` or `int4`, quipu quantizes the checkpoint while loading (a scale a row; groups of 32), llama.cpp
converts it to Q8_0 or Q4_0, and OpenVINO compresses it in its own way; the bits that a weight takes are part of the
result. Both peers multiply with activations in 8 bits, as quipu does with `--activations int8`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from bench.http_load import Answer, LoadFailed, NeverTogether, ask_all, completion, decode_rate
from bench.peers import traced
from bench.peers.checkpoint import SHAPE, make_checkpoint
from bench.peers.servers import FORMATS, HOME, MODEL, PEERS, Peer, PeerFailed, Server, in_format
from bench.shapes import TINY
from bench.trace_replay import QUICK_TRACE, TracedRequest

PROMPT_TOKENS = 64
LONG_PROMPTS = 3
"""In each turn, one after the other: the fastest counts."""


@attrs.frozen
class Load:
    """The load on each server."""

    concurrencies: Sequence[int] = (1, 8, 32, 64)
    output_tokens: int = 128
    long_prompt: int = 1024
    longest_prompt: int = 8192
    vocab_size: int = SHAPE["vocab_size"]
    trace: Sequence[TracedRequest] = ()
    """Requests of a trace, which are sent smaller (`traced.py`)."""

    def rows(self) -> dict[str, str]:
        """Return the units by row name."""
        rows = {f"decode_{num}": "tokens/s" for num in self.concurrencies}
        rows |= {f"prefill_{self.long_prompt}": "tokens/s", f"first_token_warm_{self.long_prompt}": "ms"}
        rows |= {f"decode_1_at_{self.longest_prompt}": "tokens/s", f"prefill_{self.longest_prompt}": "tokens/s"}
        return rows | (traced.UNITS if self.trace else {})


QUICK = Load(concurrencies=(1, 2), output_tokens=96, long_prompt=64, longest_prompt=96, vocab_size=TINY["vocab_size"])


def decode(port: int, prompts: Sequence[list[int]], num_tokens: int) -> tuple[float, list[Answer]]:
    """Return the rate of decoding all prompts at once, in tokens per second, and the first answers.

    A small model on a busy machine may end one stream before another begins: then outputs are doubled, up to eightfold.
    Raises LoadFailed and OSError.
    """
    answers = ask_all(port, [completion(MODEL, prompt, num_tokens) for prompt in prompts])
    longer = answers
    for factor in (2, 4, 8):
        with suppress(NeverTogether):
            return decode_rate(longer), answers
        longer = ask_all(port, [completion(MODEL, prompt, num_tokens * factor) for prompt in prompts])
    return decode_rate(longer), answers


def measure(port: int, load: Load, draw: random.Random) -> dict[str, float]:
    """Measure one turn of one server, with new prompts. Raises LoadFailed and OSError."""

    def prompt(length: int) -> list[int]:
        return draw.choices(range(1000, load.vocab_size), k=length)

    numbers = {}
    for num in load.concurrencies:
        prompts = [prompt(PROMPT_TOKENS) for _ in range(num)]
        numbers[f"decode_{num}"], _ = decode(port, prompts, load.output_tokens)
    longs = [completion(MODEL, prompt(load.long_prompt), 1) for _ in range(LONG_PROMPTS)]
    cold, warm = (min(ask_all(port, [long])[0].first_token_s for long in longs) for _ in range(2))
    numbers[f"prefill_{load.long_prompt}"] = load.long_prompt / cold
    numbers[f"first_token_warm_{load.long_prompt}"] = warm * 1000
    rate, (longest,) = decode(port, [prompt(load.longest_prompt)], load.output_tokens)
    numbers[f"decode_1_at_{load.longest_prompt}"] = rate
    numbers[f"prefill_{load.longest_prompt}"] = load.longest_prompt / longest.first_token_s
    if load.trace:
        run = traced.run_trace(port, MODEL, load.trace, str(draw.random()), load.vocab_size)
        numbers |= run.numbers()
    return numbers


def best_of(rounds: Sequence[dict[str, float]], units: dict[str, str]) -> dict[str, float]:
    """Return the highest rate or the shortest time of each row."""
    if not rounds:
        return {}
    return {name: (min if unit == "ms" else max)(numbers[name] for numbers in rounds) for name, unit in units.items()}


def compare(rounds: dict[str, list[dict[str, float]]], units: dict[str, str]) -> list[dict[str, Any]]:
    """Return a row for each name, with quipu's speed relative to the best peer, or null without one.

    `ratio` compares the best of all rounds, `paired` is the median of the ratios of each round.
    """
    best = {server: best_of(numbers, units) for server, numbers in rounds.items()}
    rows = []
    for name, unit in units.items():

        def times_faster(ours: float, theirs: float, unit: str = unit) -> float:
            return theirs / ours if unit == "ms" else ours / theirs

        values = {server: numbers[name] for server, numbers in best.items() if name in numbers}
        row: dict[str, Any] = {"name": name, "unit": unit, "values": values, "best_peer": None}
        row |= {"ratio": None, "paired": None}
        others = {server: value for server, value in values.items() if server != "quipu"}
        if others and "quipu" in values:
            pick = min if unit == "ms" else max
            peer = row["best_peer"] = pick(others, key=lambda server: others[server])
            row["ratio"] = times_faster(values["quipu"], others[peer])
            pairs = zip(rounds["quipu"], rounds[peer], strict=False)
            row["paired"] = statistics.median(times_faster(ours[name], theirs[name]) for ours, theirs in pairs)
        rows.append(row)
    return rows


def run(peers: Sequence[Peer], model: Path, load: Load, num_rounds: int, seed: int) -> dict[str, Any]:
    """Measure all servers in alternation."""
    servers: dict[str, Server] = {}
    about: dict[str, dict[str, Any]] = {}
    rounds: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in peers}
    with tempfile.TemporaryDirectory() as logs:
        try:
            for peer in peers:  # one at a time: loading takes the whole machine
                server = servers[peer.name] = Server(peer, model, Path(logs) / f"{peer.name}.log")
                try:
                    about[peer.name] = with_bits(server.wait(), model)
                    warm_up = attrs.evolve(
                        load,
                        concurrencies=(max(load.concurrencies),),
                        output_tokens=min(96, load.output_tokens),
                        longest_prompt=load.long_prompt,
                        trace=(),
                    )
                    measure(server.port, warm_up, random.Random(f"warm up {seed}"))
                except (PeerFailed, LoadFailed, OSError) as error:
                    about[peer.name] = {"failed": str(error)}
                finally:
                    server.pause()
                _log(f"{peer.name}: {about[peer.name]}")
            for number in range(num_rounds):
                for peer in peers if number % 2 == 0 else reversed(peers):
                    if "failed" in about[peer.name]:
                        continue
                    server = servers[peer.name]
                    server.resume()
                    try:
                        numbers = measure(server.port, load, random.Random(f"{seed} {number}"))
                    except (LoadFailed, OSError) as error:
                        about[peer.name]["failed"] = str(error)
                        continue
                    finally:
                        server.pause()
                    rounds[peer.name].append(numbers)
                    _log(f"round {number + 1}, {peer.name}: " + ", ".join(f"{k} {v:.1f}" for k, v in numbers.items()))
        finally:
            for server in servers.values():
                server.stop()
    units = load.rows()
    return {
        "rows": compare(rounds, units),
        "servers": about,
        "num_cores": len(os.sched_getaffinity(0)),
        "output_tokens": load.output_tokens,
        "rounds": num_rounds,
    }


def with_bits(info: dict[str, Any], model: Path) -> dict[str, Any]:
    """Add the bits that a weight takes, if the bytes of all are known."""
    if "weights_bytes" not in info:
        return info
    # bfloat16, and a header that does not matter
    num_weights = (model / "model.safetensors").stat().st_size / 2
    return {**info, "bits_per_weight": round(info["weights_bytes"] * 8 / num_weights, 2)}


def render(report: dict[str, Any]) -> str:
    names = list(report["servers"])
    lines = [" ".join([f"{'':24}", *(f"{name:>13}" for name in names), f"{'ratio':>7} {'paired':>7}"])]
    for row in report["rows"]:
        cells = [f"{row['values'][name]:13.1f}" if name in row["values"] else f"{'-':>13}" for name in names]
        ratios = ["-" if row[name] is None else f"{row[name]:.2f}" for name in ("ratio", "paired")]
        lines.append(" ".join([f"{row['name'] + ', ' + row['unit']:24}"[:32], *cells, *(f"{r:>7}" for r in ratios)]))
    bits = [(report["servers"][name] or {}).get("bits_per_weight") for name in names]
    cells = [f"{'-' if bit is None else f'{bit:.2f}':>13}" for bit in bits]
    lines.append(" ".join([f"{'bits a weight':24}", *cells]))
    return "\n".join(lines)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compare_servers(peers: Sequence[Peer], load: Load, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure servers with `load` on the checkpoint that the arguments name; with the tiny model for a quick run."""
    if arguments.quick:
        quick = attrs.evolve(QUICK, trace=QUICK_TRACE if load.trace else ())
        with tempfile.TemporaryDirectory() as folder:
            model = make_checkpoint(arguments.checkpoint or Path(folder) / "tiny", **TINY)
            return run(peers, model, quick, 1, arguments.seed)
    model = make_checkpoint(arguments.checkpoint or HOME / "qwen3-0.6b-random")
    return run(peers, model, load, arguments.rounds, arguments.seed)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise servers would outlive this process
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny model, one round")
    names = [peer.name for peer in PEERS[1:]]
    parser.add_argument("--peers", nargs="*", choices=names, default=names, help="(default: all that are installed)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--format", choices=FORMATS, default="bf16", help="of the weights")
    parser.add_argument("--activations", choices=["float", "int8"], default="float", help="of quipu, if quantized")
    load = Load()
    parser.add_argument("--streams", type=int, nargs="+", default=load.concurrencies, help="of the decodes (1 8 32 64)")
    parser.add_argument("--output-tokens", type=int, default=load.output_tokens, help="of each stream (128)")
    parser.add_argument("--longest-prompt", type=int, default=load.longest_prompt, metavar="TOKENS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="created if missing (default: one in .peers)")
    arguments = parser.parse_args()
    peers = []
    for known in PEERS:
        peer = in_format(known, arguments.format, arguments.activations)
        if peer is None:
            continue
        if peer.name != "quipu" and not peer.is_installed():
            _log(f"{peer.name} is not installed: {peer.install}")
        elif peer.name in ("quipu", *arguments.peers):
            peers.append(peer)
    load = attrs.evolve(
        load,
        concurrencies=arguments.streams,
        output_tokens=arguments.output_tokens,
        longest_prompt=arguments.longest_prompt,
    )
    report = compare_servers(peers, load, arguments)
    print(json.dumps(report) if arguments.json else render(report))
    if "failed" in report["servers"]["quipu"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
