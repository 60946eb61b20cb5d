"""The flags of `quipu bench latency` and `quipu bench throughput`, by vLLM's names if it has them.

All other flags are those of `quipu serve`, so that an engine is measured as it would serve; those about HTTP have no
effect.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import attrs

from ..one_line_parser import OneLineParser, add_command
from ..serve_flags import add_serve_flags
from .arguments import CHAT, COMPLETIONS, FROM_FILES, OFFLINE, QUICK_DATASET, Quick, add_dataset
from .values import count, positive

EPILOG = "Besides these, all flags of `quipu serve` that concern the engine."


QUICK_LATENCY = {"input_len": 8, "output_len": 4, "batch_size": 2, "num_iters_warmup": 0, "num_iters": 1}


@attrs.frozen
class Offline:
    bench: argparse.Namespace
    serve: argparse.Namespace


def parse_offline(argv: Sequence[str]) -> Offline:
    """Parse `argv`, which is without `bench`. Exits the process for invalid flags, as argparse does."""
    parser = make_offline_parser()
    bench, rest = parser.parse_known_args(argv)
    if bench.command == "throughput":
        bench.endpoint = CHAT if bench.chat else COMPLETIONS
        if bench.dataset is not None:
            bench.dataset_name, bench.dataset_path = "custom", bench.dataset
        if bench.dataset_name in FROM_FILES and bench.dataset_path is None:
            parser.error(f"--dataset-name {bench.dataset_name} needs --dataset-path")
    serving = OneLineParser(prog=f"quipu bench {bench.command}", add_help=False, allow_abbrev=False)
    add_serve_flags(serving)
    serving.set_defaults(log_level="warning")  # a line per request would spoil the numbers
    return Offline(bench, serving.parse_args([bench.model, *rest]))


def make_offline_parser() -> OneLineParser:
    parser = OneLineParser(prog="quipu bench", description="Measure an engine, without a server.")
    commands = parser.add_subparsers(dest="command", required=True)
    latency, throughput = (
        # An abbreviation of one of these might be a flag of `quipu serve`.
        add_command(commands, name, help_text, epilog=EPILOG, allow_abbrev=False)
        for name, help_text in OFFLINE.items()
    )
    for command in (latency, throughput):
        add = command.add_argument
        add("--model", default="demo", metavar="MODEL", help="a folder, a hub id, or `demo`")
        add("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature")
        add("--json", action="store_true", help="print one JSON object instead of lines")
        add("--output-json", type=Path, metavar="FILE", help="also write the JSON to this file")
        add("--disable-tqdm", action="store_true", help="no progress bar")
    add = latency.add_argument
    add("--quick", action=Quick, const=QUICK_LATENCY, help="a smoke test: one small batch")
    add("--input-len", type=positive, default=32, metavar="N", help="tokens of each prompt")
    add("--output-len", type=positive, default=128, metavar="N", help="tokens of each response")
    add("--batch-size", type=positive, default=8, metavar="N", help="sequences at once")
    add("--num-iters-warmup", type=count, default=3, metavar="N", help="iterations that are not reported")
    add("--num-iters", type=positive, default=10, metavar="N", help="iterations")
    add("--seed", type=count, metavar="N", default=0, help="seed of prompts")
    add = throughput.add_argument
    add("--quick", action=Quick, const=QUICK_DATASET, help="a smoke test: three short requests")
    same = partial(add, type=positive, metavar="N", default=argparse.SUPPRESS)
    for name in ("input", "output"):
        same(f"--{name}-len", dest=f"random_{name}_len", help=f"--random-{name}-len")
    add("--dataset", type=Path, metavar="FILE", help="--dataset-name custom --dataset-path FILE")
    add("--chat", action="store_true", help="prompts are text, and go through the chat template")
    add_dataset(throughput.add_argument_group("what is asked"))
    return parser
