"""Compare `quipu serve --executor vllm` with `vllm serve`: the same vLLM, the same checkpoint and load, in alternation.

    python -m bench.vllm_runner [--json] [--quick] [--rounds 3] [--trace FILE] [--gpu] [--python .venv-vllm/bin/python]
        [--servers quipu,vllm]

All run from one environment that has vLLM and quipu (`make test-vllm` makes it), with blocks of 32 tokens. Two peers:
`vllm` as it starts by itself, whose model is compiled, as ours is, and `vllm-eager` (`--enforce-eager`). Rows and
ratios are those of `python -m bench.peers`; `ratio` is relative to the faster of the two. `--servers` leaves some out.
Each round is printed when it is over.

With `--trace` (see `python -m bench.trace_replay`), conversations of four turns or more among its first thousand
requests are sent, too, at a sixteenth of their lengths, eight requests at a time, to pools of 2 GiB: `trace` counts
prompt and output tokens, `trace_cached` is the share of prompt tokens that a server reports as cached.

`--quick` runs a tiny model for one round; where vLLM is not installed, on quipu's own executor and without a peer.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import attrs

from bench.peers.__main__ import Load, compare_servers, render
from bench.peers.servers import PEERS, ROOT, Peer, serve_quipu, serve_vllm
from bench.trace_replay import QUICK_TRACE, TracedRequest, read_trace

TRACED = 1000
"""Requests of a trace among which conversations are chosen."""
TURNS = 4
"""What they have at least."""
COUNTED = ("--enable-prompt-tokens-details",)
BLOCK = ("--block-size", "32")
SHARED_GPU = ("--kv-cache-memory-bytes", str(2 << 30), "--gpu-memory-utilization", "0.1")
"""It demands at start that this share of the device is free."""
QUIPU = ("--executor", "vllm", "--kv-cache-memory", "2GiB")


def servers_in(python: Path, flags: Sequence[str] = ()) -> list[Peer]:
    """Return the three servers, started from this environment. `flags` are for vLLM's."""
    known = {peer.name: peer for peer in PEERS}
    ours = attrs.evolve(known["quipu"], python=python, command=partial(serve_quipu, format_flags=QUIPU))
    theirs = attrs.evolve(
        known["vllm"], python=python, command=lambda *where: [*serve_vllm(*where), *BLOCK, *COUNTED, *flags]
    )
    eager = attrs.evolve(theirs, name="vllm-eager", command=lambda *where: [*theirs.command(*where), "--enforce-eager"])
    return [ours, theirs, eager]


def conversations_of(trace: Path) -> list[TracedRequest]:
    """Return the requests that belong to a conversation of so many turns, in order.

    All prompts begin with the same block; the second one is that of their conversation.
    """
    requests = [request for request in read_trace(trace, TRACED) if len(request.hash_ids) > 1]
    turns = Counter(request.hash_ids[1] for request in requests)
    return [request for request in requests if turns[request.hash_ids[1]] >= TURNS]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise servers would outlive this process
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_runner", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny model, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="send the first requests of this trace, too")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--gpu", action="store_true", help="the servers share a GPU: each takes 2 GiB for its KV cache")
    parser.add_argument("--servers", default="quipu,vllm,vllm-eager", help="which to compare, separated by commas")
    parser.add_argument("--checkpoint", type=Path, help="created if missing (default: one in .peers)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    peers = servers_in(arguments.python.absolute(), SHARED_GPU if arguments.gpu else ())
    names = arguments.servers.split(",")
    if unknown := set(names) - {peer.name for peer in peers}:
        parser.error(f"--servers: unknown {', '.join(sorted(unknown))}; choose from {', '.join(p.name for p in peers)}")
    peers = [peer for peer in peers if peer.name in names]
    if not peers[-1].is_installed():
        if not arguments.quick:
            sys.exit(f"vLLM is not installed for {arguments.python}: make test-vllm")
        peers = PEERS[:1]  # on its own executor
    trace = QUICK_TRACE if arguments.quick else conversations_of(arguments.trace) if arguments.trace else []
    report = compare_servers(peers, Load(concurrencies=(1, 8, 32), longest_prompt=2048, trace=trace), arguments)
    print(json.dumps(report) if arguments.json else render(report))
    if any("failed" in about for about in report["servers"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
