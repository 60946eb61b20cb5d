"""The flags of `quipu serve`. They have vLLM's names where it has them. Used by `cli.py`."""

from __future__ import annotations

import argparse

from ..auth.browser_rules import parse_hosts, parse_origins
from ..options import AppOptions
from .keys import add_key_flags
from .kv_events_flag import parse_kv_events
from .ledger_flags import add_ledger_flags
from .sizes import parse_size

OPTIONS = AppOptions()
"""The defaults of the web layer."""


def add_serve_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model", nargs="?", default="demo", help="a folder, a hub id, or `demo` (the default), which ships inside"
    )
    add = command.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)")
    add("--served-model-name", nargs="+", metavar="NAME", help="names that clients may ask for (default: the model's)")
    add("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto", help="of weights and KV cache")
    add("--load-format", choices=["auto", "dummy"], default="auto", help="`dummy`: random weights in its shape")
    add("--block-size", type=_positive, default=16, help="tokens a KV block holds (default: %(default)s)")
    add(
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        type=parse_size,
        metavar="SIZE",
        help="memory of the KV cache, such as 4GiB (default: room for sixteen of the longest prompts, in 4GiB or less; "
        "docs/loading.md)",
    )
    add(
        "--gpu-memory-utilization",
        type=_utilization,
        metavar="SHARE",
        help="of the memory of the device that computes, a CPU's too: for weights, passes and KV cache together",
    )
    add(
        "--num-blocks",
        "--num-gpu-blocks-override",
        type=_positive,
        help="KV blocks, the null block included, whatever memory they take",
    )
    add("--max-model-len", type=_positive, help="longest prompt and output together (default: the model's own)")
    add(
        "--determinism",
        choices=["auto", "strict", "fast"],
        default="auto",
        help="`strict`: a prompt's results are the same bits whatever its batch, chunks and cache; `auto`: strict "
        "where that is free; /server_info says what runs",
    )
    add("--threads", type=_positive, help="that compute (default: OMP_NUM_THREADS, else as many as the CPUs allowed)")
    add("--max-num-seqs", type=_positive, default=256, help="sequences in one step at most (default: %(default)s)")
    add("--max-num-batched-tokens", type=_positive, default=2048, help="tokens in one step (default: %(default)s)")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV of prompts that begin alike",
    )
    add(
        "--share-pending-prefixes",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let a request wait a step or two for a prefix that another is computing, where that pays",
    )
    add(
        "--max-pinned-share",
        type=_share,
        default=0.5,
        metavar="SHARE",
        help="of the KV blocks, that prompts marked with `cache_control` may keep from being reused; 0 is none "
        "(default: %(default)s)",
    )
    add(
        "--scheduling-policy",
        choices=["fcfs", "priority", "fair"],
        default="fcfs",
        help="who is admitted first: by arrival, by the request's `priority`, or by what tenants have had computed",
    )
    add(
        "--long-prefill-token-threshold",
        type=_count,
        default=0,
        metavar="TOKENS",
        help="longest chunk of one prompt in a step that others share; 0 is off",
    )
    add(
        "--max-waiting-requests",
        type=_count,
        metavar="N",
        help="sequences that may wait, beyond which requests are answered 503; 0 is no limit (default: four times "
        "--max-num-seqs, and 1024 at least)",
    )
    add(
        "--max-waiting-tokens",
        type=_count,
        metavar="N",
        help="prompt tokens that may wait, likewise (default: 2048 for each of four times --max-num-seqs sequences, "
        "and eight of the longest prompts at least)",
    )
    add(
        "--max-connections",
        type=_positive,
        metavar="N",
        help="clients connected at a time (default: 4096, or as many as there are file descriptors for)",
    )
    add(
        "--max-body-bytes",
        type=parse_size,
        default=OPTIONS.max_body_bytes,
        metavar="SIZE",
        help="largest body of a request, such as 8MiB, the default (docs/limits.md says why)",
    )
    add(
        "--max-body-memory",
        type=parse_size,
        default=OPTIONS.max_body_memory_bytes,
        metavar="SIZE",
        help="for the bodies of all requests that are not encoded yet; more are answered 503 (default: 256MiB)",
    )
    add(
        "--chat-template-timeout",
        type=_positive_seconds,
        default=5.0,
        metavar="SECONDS",
        help="for the chat template to render one request, which gets a 400 then (default: %(default)s)",
    )
    add(
        "--kv-events-config",
        type=parse_kv_events,
        metavar="JSON",
        help="publish what the prefix cache holds, token ids included (docs/kv-events.md)",
    )
    add_key_flags(command)
    add("--open-admin", action="store_true", help="without keys: answer admin routes to other machines, too")
    hosts_help = "that `Host` may name beside loopback's, or `*` (default: none on loopback without keys, else any)"
    add("--allowed-hosts", type=parse_hosts, action="extend", default=[], metavar="HOST,...", help=hosts_help)
    origins_help = "list of sites whose pages may ask, such as '[\"https://site.example\"]' (default: none)"
    add("--allowed-origins", type=parse_origins, default=frozenset(), metavar="JSON", help=origins_help)
    add(
        "--request-timeout",
        type=_positive_seconds,
        metavar="SECONDS",
        help="end a request that takes longer (default: never)",
    )
    add(
        "--step-timeout",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="restart the engine when one step takes longer; 0 is never (default: %(default)s)",
    )
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span a request here, over OTLP/HTTP (default: as OTEL_EXPORTER_OTLP_ENDPOINT says, if anything)",
    )
    add(
        "--allow-client-priority",
        action="store_true",
        help="let any request name its `priority`; otherwise only keys marked so may (docs/keys.md)",
    )
    add("--always-include-usage", action="store_true", help="put usage into every stream, asked for or not")
    add(
        "--keep-billing-header",
        action="store_true",
        help="render the x-anthropic-billing-header of Claude Code's prompts, which then never hit across sessions",
    )
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    add("--data-dir", default="data", help="where the server keeps what must outlive it (default: %(default)s)")
    add_ledger_flags(add)
    add("--shutdown-timeout", type=_seconds, default=30.0, metavar="SECONDS", help="for open requests at the end")
    add(
        "--executor",
        choices=["auto", "triton", "cpu", "reference", "fake"],
        default="auto",
        help="`triton`: kernels for an NVIDIA GPU; `cpu`: kernels compiled for this processor; `reference`: plain "
        "torch; `auto`: the first of them that can run the model; `fake` computes nothing (default: %(default)s)",
    )
    add("--fake-step-seconds", type=float, default=0.005, help=argparse.SUPPRESS)
    add("--fake-poison-token-id", type=int, help=argparse.SUPPRESS)
    add("--fake-token-id", type=int, help=argparse.SUPPRESS)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def _positive(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _positive_seconds(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is negative" if value < 0 else f"{text} is no time")
    return value


def _utilization(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _count(text: str) -> int:
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _port(text: str) -> int:
    value = _whole(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{value} is not a port")
    return value
