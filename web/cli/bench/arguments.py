"""The flags of `quipu bench serve`, named as in the benchmarks of vLLM and SGLang if these have them."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from ..one_line_parser import OneLineParser, add_command
from ..server_flags import add_server_flags
from .report import METRICS
from .values import count, finite, header, json_object, metrics, percentiles, positive, rate, ratio

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DATASETS = ("random", "shared-prefix", "multi-turn", "custom", "trace")
DATASET_ALIASES = {"prefix_repetition": "shared-prefix", "generated-shared-prefix": "shared-prefix"}
FROM_FILES = ("custom", "trace")
ONLINE = "send many requests to an OpenAI-compatible server, and report its latency and throughput"
OFFLINE = {
    "latency": "measure how long one batch takes from its first prompt to its last token, without a server",
    "throughput": "measure the throughput of an engine that gets all requests at once, without a server",
}


def make_serve_parser() -> OneLineParser:
    parser = OneLineParser(prog="quipu bench", description="Measure a server or an engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in OFFLINE.items():  # they have parsers of their own, see offline_arguments.py
        add_command(commands, name, help_text)
    serve = add_command(commands, "serve", ONLINE)
    serve.add_argument("--quick", action=Quick, const=QUICK_DATASET, help="a smoke test: three short requests")
    _add_target(serve.add_argument_group("server"))
    add_dataset(serve.add_argument_group("dataset"))
    _add_load(serve.add_argument_group("load"))
    _add_sampling(serve.add_argument_group("sampling"))
    _add_output(serve.add_argument_group("report"))
    return parser


class Quick(argparse.Action):
    """`--quick`: other defaults, so that a command ends in seconds. Flags that follow it override them."""

    def __init__(self, option_strings: list[str], dest: str, *, const: dict[str, Any], help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, const=const, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object) -> None:
        for name, value in self.const.items():
            setattr(namespace, name, value)


QUICK_DATASET = {"num_prompts": 3, "random_input_len": 16, "random_output_len": 4}


def check(arguments: argparse.Namespace) -> str | None:
    """Return what is wrong with a combination of flags, None if nothing is."""
    is_chat = arguments.endpoint == CHAT
    if arguments.prompt_format == "ids" and is_chat:
        return f"--prompt-format ids: {CHAT} takes text only"
    if arguments.prompt_format == "ids" and arguments.dataset_name == "multi-turn":
        return "--prompt-format ids: responses are text, so multi-turn prompts must be text"
    if arguments.dataset_name in FROM_FILES and arguments.dataset_path is None:
        return f"--dataset-name {arguments.dataset_name} needs --dataset-path"
    if arguments.dataset_path is not None and arguments.dataset_name not in FROM_FILES:
        return f"--dataset-path: --dataset-name {arguments.dataset_name} reads no file"
    if arguments.save_detailed and arguments.save_result is None:
        return "--save-detailed needs --save-result"
    return None


def _add_target(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add_server_flags(add)
    endpoints = f"{COMPLETIONS} (the default) or {CHAT}"
    add("--endpoint", choices=[COMPLETIONS, CHAT], default=COMPLETIONS, metavar="PATH", help=endpoints)
    add("--model", help="model to request (default: the first that GET /v1/models lists)")
    add(
        "--header",
        action="append",
        type=header,
        default=[],
        metavar="K=V",
        help="an additional header; may be repeated",
    )
    add("--request-timeout", type=finite, default=3600.0, metavar="S", help="time after which a request has failed")


def add_dataset(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    number = partial(add, type=positive, metavar="N")
    add("--dataset-name", type=_dataset, choices=DATASETS, default="random", help="kind of prompts")
    add("--dataset-path", type=Path, metavar="FILE", help="file of JSON lines, for `custom` and `trace`")
    number("--num-prompts", help="requests, or conversations (default: 1000, or all of the file)")
    add("--seed", type=count, metavar="N", default=0, help="seed of prompts, lengths and arrivals")
    formats = "format of generated prompts (default: ids if the endpoint takes them)"
    add("--prompt-format", choices=["ids", "text"], help=formats)
    number("--vocab-size", help="of the model, for generated ids (default: as quipu reports, otherwise 8000)")
    number("--random-input-len", default=1024, help="tokens or words")
    number("--random-output-len", default=128, help="tokens")
    add("--random-range-ratio", type=ratio, default=0.0, metavar="R", help="lengths are L*(1-r) to L*(1+r)")
    shared = partial(_add_shared_prefix, group)
    shared("num-prefixes", "num-groups", 10, "used in turn")
    shared("prefix-len", "system-prompt-len", 256, "tokens or words that prompts share")
    shared("suffix-len", "question-len", 256, "tokens or words of each prompt's own")
    shared("output-len", "output-len", 128, "tokens")
    number("--multi-turn-num-turns", default=4, help="turns of a conversation")
    number("--custom-output-len", default=256, help="output tokens for rows without a length")
    number("--trace-block-tokens", default=512, help="tokens of each hash id")
    add("--trace-speed", type=finite, default=1.0, metavar="X", help="replay speed, relative to the recording")
    add("--trace-scale", type=finite, default=1.0, metavar="X", help="factor for all lengths")


def _add_shared_prefix(group: argparse._ArgumentGroup, name: str, sglang_name: str, default: int, text: str) -> None:
    """Add a flag by our name and, hidden from the help, by vLLM's and SGLang's."""
    add = partial(group.add_argument, type=positive, metavar="N", dest=f"shared_prefix_{name.replace('-', '_')}")
    add(f"--shared-prefix-{name}", default=default, help=text)
    add(f"--prefix-repetition-{name}", f"--gsp-{sglang_name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    rates = "conversations started per second; inf is all at once (default: inf, or the timestamps of a trace)"
    add("--request-rate", type=rate, metavar="R", help=rates)
    regularity = "1 is Poisson, higher is more regular, inf is constant"
    add("--burstiness", type=rate, default=1.0, metavar="B", help=regularity)
    add(
        "--max-concurrency",
        type=positive,
        metavar="N",
        help="maximum number of concurrent requests (default: no limit)",
    )
    add("--num-warmups", type=count, metavar="N", default=0, help="requests before the run that are not reported")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature")
    add("--ignore-eos", action="store_true", help="send `ignore_eos`, so that responses have the requested length")
    overrides = "fields that override those of every request"
    add("--extra-body", type=json_object, default={}, metavar="JSON", help=overrides)


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    forms = group.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    forms.add_argument("--csv", action="store_true", help="print CSV, a line of names and a line of values, instead")
    file_help = "also write the JSON to this file, or CSV if its name ends in .csv"
    add("--save-result", type=Path, metavar="FILE", help=file_help)
    add("--save-detailed", action="store_true", help="include a row for each request in the saved JSON")
    names = list(METRICS)
    names_help = f"times whose percentiles are reported (default: {','.join(names)})"
    add("--percentile-metrics", type=metrics, default=names, metavar="NAMES", help=names_help)
    percentiles_help = "which percentiles (default: 90,99)"
    add("--metric-percentiles", type=percentiles, default=[90.0, 99.0], metavar="P,P", help=percentiles_help)
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _dataset(text: str) -> str:
    return DATASET_ALIASES.get(text, text)
