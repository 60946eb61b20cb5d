"""The flags of `quipu bench serve`. Names are those of the field's benchmarks where they have one."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from .report import METRICS
from .values import (
    count,
    header,
    json_object,
    metrics,
    percentiles,
    positive,
    positive_float,
    rate,
    ratio,
    url,
    visible,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DATASETS = ("random", "shared-prefix", "multi-turn", "custom", "trace")
DATASET_ALIASES = {"prefix_repetition": "shared-prefix", "generated-shared-prefix": "shared-prefix"}
"""What vLLM and SGLang call a dataset of ours."""
FROM_FILES = ("custom", "trace")
OFFLINE = {
    "latency": "how long one batch takes from its first prompt to its last token, without a server",
    "throughput": "what an engine does a second, given everything at once, without a server",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quipu bench", description="measure a server or an engine")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in OFFLINE.items():  # with parsers of their own, see offline_arguments.py
        commands.add_parser(name, help=help_text)
    serve = commands.add_parser("serve", help="ask an OpenAI-compatible server many things, and report how it answered")
    serve.add_argument("--quick", action=Quick, const=QUICK_DATASET, help="only whether it runs: three short requests")
    _add_target(serve.add_argument_group("who is asked"))
    add_dataset(serve.add_argument_group("what is asked"))
    _add_load(serve.add_argument_group("when"))
    _add_sampling(serve.add_argument_group("how the answers are made"))
    _add_output(serve.add_argument_group("what is reported"))
    return parser


class Quick(argparse.Action):
    """`--quick`: other defaults, so that a command ends in seconds. A flag that follows it has the last word."""

    def __init__(self, option_strings: list[str], dest: str, *, const: dict[str, Any], help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, const=const, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object) -> None:
        for name, value in self.const.items():
            setattr(namespace, name, value)


QUICK_DATASET = {"num_prompts": 3, "random_input_len": 16, "random_output_len": 4}


def check(arguments: argparse.Namespace) -> str | None:
    """What is wrong with flags that do not go together."""
    is_chat = arguments.endpoint == CHAT
    if arguments.prompt_format == "ids" and is_chat:
        return f"--prompt-format ids: {CHAT} takes text only"
    if arguments.prompt_format == "ids" and arguments.dataset_name == "multi-turn":
        return "--prompt-format ids: answers come back as text, so multi-turn prompts are text"
    if arguments.dataset_name in FROM_FILES and arguments.dataset_path is None:
        return f"--dataset-name {arguments.dataset_name} needs --dataset-path"
    if arguments.dataset_path is not None and arguments.dataset_name not in FROM_FILES:
        return f"--dataset-path: --dataset-name {arguments.dataset_name} reads no file"
    if arguments.save_detailed and arguments.save_result is None:
        return "--save-detailed needs --save-result"
    return None


def _add_target(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--base-url", type=url, default="http://127.0.0.1:8000", help="with or without /v1 (default: %(default)s)")
    add(
        "--endpoint",
        choices=[COMPLETIONS, CHAT],
        default=COMPLETIONS,
        metavar="PATH",
        help=f"{COMPLETIONS} (the default) or {CHAT}",
    )
    add("--model", help="what to ask for (default: the first that GET /v1/models lists)")
    add("--api-key", type=visible, help="sent as a bearer token (default: the environment's OPENAI_API_KEY)")
    add("--header", action="append", type=header, default=[], metavar="K=V", help="one more header; may be repeated")
    add("--request-timeout", type=positive_float, default=3600.0, metavar="S", help="then a request has failed")


def add_dataset(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", type=_dataset, choices=DATASETS, default="random", help="(default: %(default)s)")
    add("--dataset-path", type=Path, metavar="FILE", help="JSON lines, of `custom` and `trace`")
    add(
        "--num-prompts",
        type=positive,
        metavar="N",
        help="requests, or conversations (default: 1000, or all of the file)",
    )
    add("--seed", type=count, metavar="N", default=0, help="of prompts, lengths and arrivals (default: %(default)s)")
    add(
        "--prompt-format", choices=["ids", "text"], help="of drawn prompts (default: ids where the endpoint takes them)"
    )
    add(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="of the model, for drawn ids (default: as quipu says, else a safe 8000)",
    )
    add("--random-input-len", type=positive, metavar="N", default=1024, help="tokens, or words (default: %(default)s)")
    add("--random-output-len", type=positive, metavar="N", default=128, help="tokens (default: %(default)s)")
    add(
        "--random-range-ratio",
        type=ratio,
        default=0.0,
        metavar="R",
        help="lengths are L*(1-r) to L*(1+r) (default: %(default)s)",
    )
    shared = partial(_add_shared_prefix, group)
    shared("num-prefixes", "num-groups", 10, "they take turns")
    shared("prefix-len", "system-prompt-len", 256, "tokens, or words, that prompts share")
    shared("suffix-len", "question-len", 256, "of each prompt's own")
    shared("output-len", "output-len", 128, "tokens")
    add(
        "--multi-turn-num-turns",
        type=positive,
        metavar="N",
        default=4,
        help="of a conversation (default: %(default)s)",
    )
    add(
        "--custom-output-len",
        type=positive,
        metavar="N",
        default=256,
        help="of rows that say none (default: %(default)s)",
    )
    add(
        "--trace-block-tokens",
        type=positive,
        metavar="N",
        default=512,
        help="that a hash id stands for (default: %(default)s)",
    )
    add(
        "--trace-speed",
        type=positive_float,
        default=1.0,
        metavar="X",
        help="times as fast as recorded (default: %(default)s)",
    )
    add(
        "--trace-scale",
        type=positive_float,
        default=1.0,
        metavar="X",
        help="multiplies all lengths (default: %(default)s)",
    )


def _add_shared_prefix(group: argparse._ArgumentGroup, name: str, sglang_name: str, default: int, text: str) -> None:
    """By our name, and unseen in the help by vLLM's and SGLang's."""
    add = partial(group.add_argument, type=positive, metavar="N", dest=f"shared_prefix_{name.replace('-', '_')}")
    add(f"--shared-prefix-{name}", default=default, help=f"{text} (default: {default})")
    add(f"--prefix-repetition-{name}", f"--gsp-{sglang_name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--request-rate",
        type=rate,
        metavar="R",
        help="beginnings a second; inf is all at once (default: inf, or as a trace's timestamps say)",
    )
    add(
        "--burstiness",
        type=rate,
        default=1.0,
        metavar="B",
        help="1 is Poisson, more is steadier, inf constant (default: 1)",
    )
    add("--max-concurrency", type=positive, metavar="N", help="requests in flight at most (default: no limit)")
    add(
        "--num-warmups",
        type=count,
        metavar="N",
        default=0,
        help="requests before the run, not reported (default: %(default)s)",
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="(default: %(default)s)")
    add("--ignore-eos", action="store_true", help="send `ignore_eos`: answers have the length that was asked for")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="fields of every request, over all others")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    forms = group.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    forms.add_argument("--csv", action="store_true", help="print a line of names and a line of values instead")
    add("--save-result", type=Path, metavar="FILE", help="write the JSON there, too; a name in .csv gets CSV")
    add("--save-detailed", action="store_true", help="with a row for each request, in JSON")
    add(
        "--percentile-metrics",
        type=metrics,
        default=list(METRICS),
        metavar="NAMES",
        help=f"(default: {','.join(METRICS)})",
    )
    add("--metric-percentiles", type=percentiles, default=[90.0, 99.0], metavar="P,P", help="(default: 90,99)")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _dataset(text: str) -> str:
    return DATASET_ALIASES.get(text, text)
