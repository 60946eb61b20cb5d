"""Servers under load whose processes are killed and whose surroundings fail, and what their clients and ledgers say.

    python -m tests.chaos [--minutes 5] [--engines 1|prefill:1,decode:2] [--executor vllm] [--tiers] [--seed N] [--json]
                          [--quick]
                          [--parts load clients tokens] [--clients 10000] [--tokens 12]

`make chaos` runs this. The parts:

    load     OpenAI's and Anthropic's clients and raw sockets, with streams, disconnects and slow readers, ask two
             servers (one on the fake executor, one on a tiny model) while engines are killed, stopped or paused 3 to
             15 seconds apart (any of several; they are also drained, removed and added), memory and descriptors are
             lowered, the ledger's database is stopped and started, and the disk with the ledger's files and the log
             fills. Both have a host tier, and far less room on the device. Every answer is compared with the
             undisturbed one, and every record with the answer. With `--tiers`, both also keep KV on a disk and in a
             bucket; bytes of the disk's files are changed, and the bucket is gone for a second at a time.
    clients  clients that connect, ask and vanish at random moments; the server must then hold what it held before
    tokens   an engine is killed at every token of a streamed, a plain, a constrained, a scored and an n = 4 request,
             and in every step of such requests whose steps yield up to four tokens

With `--executor vllm`, in an environment that has it, `load` alone is run, on the tiny model through vLLM's runner; the
other parts need answers that take no time.

The report names what this machine cannot do (`left_out`). The exit code is 1 if anything was lost, doubled, disputed,
wrong, or failed for another's fault.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PARTS = ("load", "clients", "tokens")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="of the part `load` (default: %(default)s)")
    parser.add_argument("--engines", default="1", help="of each server, as for `quipu serve` (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=10_000, help="that vanish (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=12, help="at which an engine is killed (default: %(default)s)")
    parser.add_argument("--executor", choices=["vllm"], help="of the model (default: our kernels)")
    parser.add_argument(
        "--tiers", action="store_true", help="servers also keep KV on a disk and in a bucket, which fail"
    )
    parser.add_argument("--seed", type=int, default=None, help="default: random")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    parser.add_argument("--json", action="store_true", help="print the report alone")
    parser.add_argument("--quick", action="store_true", help="smoke test: a little of each part, in seconds")
    arguments = parser.parse_args(argv)
    if arguments.executor == "vllm":
        os.environ["QUIPU_TEST_EXECUTOR"], arguments.parts = "vllm", ["load"]
    # what these modules start depends on the executor
    from tests.chaos.chaotic_run import run_load
    from tests.chaos.every_token import run_every_token
    from tests.chaos.vanishing_clients import run_vanishing_clients

    seed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    quick = arguments.quick
    engines: str = arguments.engines
    report: dict[str, Any] = {"seed": seed, "engines": engines, "left_out": []}
    began = time.monotonic()
    for part in arguments.parts:
        if not arguments.json:
            print(f"{part} (seed {seed})", flush=True)
        with tempfile.TemporaryDirectory(prefix="quipu-chaos-") as name:
            folder = Path(name)
            match part:
                case "load":
                    seconds = 2.0 if quick else 60 * arguments.minutes
                    left_out = report["left_out"]
                    report["load"] = run_load(
                        folder, seconds, seed, left_out, engines, quick=quick, has_tiers=arguments.tiers
                    )
                case "clients":
                    num_clients = 20 if quick else arguments.clients
                    report["clients"] = run_vanishing_clients(folder, num_clients, seed, engines)
                case _:
                    num_tokens, num_kinds = (1, 1) if quick else (arguments.tokens, 5)
                    report["tokens"] = run_every_token(folder, engines, num_tokens, num_kinds)
    report["seconds"] = round(time.monotonic() - began, 1)
    report["problems"] = [problem for part in arguments.parts for problem in report[part].pop("problems")]
    print(json.dumps(report, indent=None if arguments.json else 2))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
