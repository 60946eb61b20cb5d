"""Measure speculative decoding: tokens a pass on texts of the demo model, and what they are worth in a larger shape.

    python -m bench.speculation [--json] [--quick] [--streams 1 8 32] [--tokens 128] [--rounds 7] [--cases 20]
                                [--texts copy_editing random ...] [--given FILE] [--beside [quipu] [vllm]]
                                [--draft-model 0.6 0.8 0.9]

1. Tokens a pass, with `--speculative suffix`, where the demo model says words again, calls tools and writes JSON,
   freely and under a schema, whose forced tokens count. Nothing is timed.
2. Tokens a second in the shape of Qwen3-0.6B, with drafts as often right as those, beside the same engine without.
3. The same for random text, where there is nothing to find: what looking for it costs.

With `--draft-model`, what a draft model is worth in that shape whose tokens are so often right, instead
(`replaying_model.py`).

With `--beside`, these servers serve the demo model with and without drafts, one request at a time, instead
(`beside_vllm.py`).

Texts with drafts are compared with those without, token by token.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

# the same setting as in the server's engine process; torch reads it once, when it loads
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import attrs
import trio

from bench.peers.servers import PeerFailed
from bench.shapes import TINY

from .beside_vllm import FREE_TEXTS, SERVERS, Beside, compare
from .demo_texts import TEXTS, Found, measure_texts
from .drafted_engine import RANDOM, Gain, measure_gains, measure_model_gains


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure speculative decoding.")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny shape, few tokens")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32], help="none: only count (1 8 32)")
    parser.add_argument("--tokens", type=int, default=128, help="outputs of each stream (128)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of runs with and without (7)")
    parser.add_argument("--cases", type=int, default=20, help="texts of each kind (20)")
    parser.add_argument("--texts", nargs="+", choices=[*TEXTS, RANDOM], default=[*TEXTS, RANDOM])
    parser.add_argument("--given", type=Path, metavar="FILE", help="what --json printed: take tokens a pass from there")
    parser.add_argument("--beside", nargs="+", choices=SERVERS, help="compare what drafts are worth to these servers")
    parser.add_argument(
        "--draft-model", type=float, nargs="+", metavar="SHARE", help="how often a draft model is right: measure that"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.streams, arguments.tokens, arguments.rounds, arguments.cases = [1, 2], 16, 1, 1
    if arguments.beside:
        names = [name for name in arguments.texts if name in FREE_TEXTS]
        try:
            compared = compare(names, arguments.cases, arguments.rounds, arguments.beside)
        except PeerFailed as error:
            sys.exit(str(error))
        print_beside(compared, arguments.json)
        return
    shape = TINY if arguments.quick else {}
    if arguments.draft_model:
        gains = []
        for num_streams in arguments.streams:
            gains += trio.run(
                measure_model_gains, num_streams, arguments.tokens, arguments.rounds, arguments.draft_model, shape
            )
        if arguments.json:
            print(json.dumps({"gains": [attrs.asdict(gain) for gain in gains]}))
        else:
            print_gains(gains)
        return
    if arguments.given is None:
        texts = measure_texts([name for name in TEXTS if name in arguments.texts], arguments.cases)
    else:
        rows = json.loads(arguments.given.read_text("utf-8"))["texts"]
        texts = {name: Found.of_row(row) for name, row in rows.items()}
    rates = {name: texts[name].rates() if name in texts else [] for name in arguments.texts}
    gains = []
    for num_streams in arguments.streams:
        measure = partial(measure_gains, num_streams, arguments.tokens, arguments.rounds, rates)
        gains += trio.run(measure, shape)
    if arguments.json:
        found_rows = {name: found.to_row() for name, found in texts.items()}
        print(json.dumps({"texts": found_rows, "gains": [attrs.asdict(gain) for gain in gains]}))
        return
    print(f"{'text of the demo model':<24}{'tokens':>8}{'drafted':>9}{'accepted':>10}{'tokens a pass':>15}")
    for name, found in texts.items():
        print(
            f"{name:<24}{found.num_tokens:>8}{found.num_drafted:>9}{found.num_accepted:>10}{found.tokens_a_pass:>15.2f}"
        )
    if gains:
        print()
        print_gains(gains)


def print_gains(gains: list[Gain]) -> None:
    print(f"{'streams':<9}{'text':<24}{'tokens/s without':>17}{'with/without':>14}{'lowest':>8}{'tokens a pass':>15}")
    for gain in gains:
        print(
            f"{gain.num_streams:<9}{gain.name:<24}{gain.num_plain_a_s:>17.1f}{gain.ratio:>14.3f}{gain.lowest:>8.3f}"
            f"{gain.tokens_a_pass:>15.2f}"
        )


def print_beside(rows: list[Beside], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"beside": [attrs.asdict(row) for row in rows]}))
        return
    print(f"{'server':<9}{'text':<24}{'tokens a pass':>14}{'tokens/s without':>18}{'with/without':>14}")
    for row in rows:
        print(f"{row.server:<9}{row.text:<24}{row.tokens_a_pass:>14.2f}{row.num_plain_a_s:>18.1f}{row.ratio:>14.3f}")


if __name__ == "__main__":
    main()
