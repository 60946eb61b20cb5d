"""The command line: `quipu serve MODEL`, and the commands beside it.

Flags have vLLM's names where it has them. Resolves flags and checkpoint into a `HouseConfig`, runs the house and the
HTTP server in one nursery, and stops in three steps on SIGTERM or SIGINT: ask (drain), wait (the grace), kill.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import attrs
import structlog
import trio

import quipu
from quipu.actors.checkpoint import CheckpointError, CheckpointInfo, default_num_blocks, read_info, resolve
from quipu.actors.config import EngineConfig, HouseConfig
from quipu.actors.front import ServingInfo
from quipu.actors.ledger.database import LedgerError
from quipu.actors.ledger.gauges import install_gauges
from quipu.actors.ledger.reconciling import parse_metrics
from quipu.actors.ledger.service import LedgerConfig, open_ledger
from quipu.actors.supervisor import EngineGivenUp
from quipu.actors.wiring import House, split
from quipu.web import logs
from quipu.web.admin.usage_source import LedgerUsage
from quipu.web.app import make_app
from quipu.web.key_command import add_key_actions, add_key_flags, key_store, reloading_on_hangup, run_keys
from quipu.web.key_file import KeyFileError
from quipu.web.keys import KeyStore
from quipu.web.kv_events import parse_kv_events
from quipu.web.ledger_command import add_ledger_actions, add_ledger_flags, ledger_config, ledger_settings, run_ledger
from quipu.web.options import AppOptions
from quipu.web.server import Address, ServerConfig, serve
from quipu.web.tracing import TracingConfig, TracingError, open_tracer, tracing_config
from quipu.web.usage_command import add_usage_flags, run_usage

log = structlog.get_logger("quipu.cli")

EXIT_FAILED = 1
EXIT_USAGE = 2
CLOSING_S = 2.0
"""After the drain: how long connections may take to end, all generation having ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `quipu` command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["bench"]:  # a client, with flags of its own: no server loads it
        from quipu.web.bench.command import main as bench

        return bench(argv[1:])
    arguments = make_parser().parse_args(argv)
    if arguments.command == "keys":
        return run_keys(arguments)
    if arguments.command == "ledger":
        return run_ledger(arguments, os.environ)
    if arguments.command == "usage":
        return run_usage(arguments, os.environ)
    logs.configure(arguments.log_level)
    if arguments.kv_events_config is not None and not arguments.enable_prefix_caching:
        print("quipu: --kv-events-config needs prefix caching: without it nothing can be found", file=sys.stderr)
        return EXIT_USAGE
    try:
        keys = key_store(arguments, os.environ)
        ledger = ledger_config(arguments, os.environ)
        tracing = tracing_config(arguments.otlp_traces_endpoint, os.environ)
        config, info = resolve_config(arguments)
        info = attrs.evolve(info, settings=info.settings | ledger_settings(ledger))
    except (CheckpointError, KeyFileError, LedgerError, TracingError) as error:
        print(f"quipu: {error}", file=sys.stderr)
        return EXIT_USAGE
    options = AppOptions(
        always_include_usage=arguments.always_include_usage,
        keep_billing_header=arguments.keep_billing_header,
        request_timeout_s=arguments.request_timeout,
    )
    server = ServerConfig(graceful_timeout_s=CLOSING_S)
    failure: str | None = None
    try:
        trio.run(
            partial(
                run_server,
                config,
                info,
                options,
                server,
                keys,
                ledger,
                tracing,
                host=arguments.host,
                port=arguments.port,
                grace_s=arguments.shutdown_timeout,
            )
        )
    except* EngineGivenUp as group:
        failure = f"the engine is given up: {_leaf(group)}"
    except* (CheckpointError, LedgerError, TracingError) as group:  # files that are read when the house opens
        failure = str(_leaf(group))
    except* OSError as group:
        failure = f"cannot listen on {arguments.host} port {arguments.port}: {_leaf(group)}"
    if failure is not None:
        print(f"quipu: {failure}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def make_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = argparse.ArgumentParser(prog="quipu", description=quipu.__doc__.splitlines()[0] if quipu.__doc__ else None)
    parser.add_argument("--version", action="version", version=f"quipu {quipu.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("bench", help="measure a server: `quipu bench serve --help`")
    add_ledger_actions(commands.add_parser("ledger", help="verify, export or reconcile the usage ledger"))
    add_usage_flags(commands.add_parser("usage", help="what was used, by model, key or tenant"))
    command = commands.add_parser("serve", help="serve a model over the OpenAI and Anthropic APIs")
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
    add("--num-blocks", type=_positive, help="KV blocks, the null block included (default: from memory and context)")
    add("--max-model-len", type=_positive, help="longest prompt and output together (default: the model's own)")
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
    add("--max-waiting-requests", type=_count, default=0, metavar="N", help="more are answered 503; 0 is no limit")
    add("--max-waiting-tokens", type=_count, default=0, metavar="N", help="prompt tokens that may wait, likewise")
    add(
        "--kv-events-config",
        type=parse_kv_events,
        metavar="JSON",
        help="publish what the prefix cache holds, token ids included (docs/kv-events.md)",
    )
    add_key_flags(command)
    add("--request-timeout", type=float, metavar="SECONDS", help="end a request that takes longer (default: never)")
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span a request here, over OTLP/HTTP (default: as OTEL_EXPORTER_OTLP_ENDPOINT says, if anything)",
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
    add("--shutdown-timeout", type=float, default=30.0, metavar="SECONDS", help="for open requests at the end")
    add("--executor", choices=["reference", "fake"], default="reference", help="`fake` computes nothing")
    add("--fake-step-seconds", type=float, default=0.005, help=argparse.SUPPRESS)
    add("--fake-poison-token-id", type=int, help=argparse.SUPPRESS)
    add_key_actions(commands.add_parser("keys", help="make API keys for a key file"))
    return parser


def resolve_config(arguments: argparse.Namespace) -> tuple[HouseConfig, ServingInfo]:
    """Every size of the server, from flags and the checkpoint. Raises CheckpointError."""
    path = resolve(arguments.model)
    checkpoint = read_info(path, name=_model_name(arguments.model), dtype=arguments.dtype)
    names = tuple(arguments.served_model_name or [checkpoint.name])
    max_model_len, num_blocks = _resolve_sizes(arguments, checkpoint)
    engine = EngineConfig(
        model_path=str(path),
        executor=arguments.executor,
        dtype=checkpoint.dtype,
        load_format=arguments.load_format,
        block_size=arguments.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=min(arguments.max_num_seqs, arguments.max_num_batched_tokens),
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        eos_token_ids=checkpoint.eos_token_ids,
        enable_prefix_caching=arguments.enable_prefix_caching,
        share_pending_prefixes=arguments.share_pending_prefixes,
        max_pinned_share=arguments.max_pinned_share,
        scheduling_policy=arguments.scheduling_policy,
        long_prefill_token_threshold=arguments.long_prefill_token_threshold,
        max_waiting_requests=arguments.max_waiting_requests,
        max_waiting_tokens=arguments.max_waiting_tokens,
        log_level=arguments.log_level,
        fake_step_seconds=arguments.fake_step_seconds,
        fake_poison_token_id=arguments.fake_poison_token_id,
        kv_events=arguments.kv_events_config,
    )
    config = HouseConfig(engine=engine, model_names=names, vocab_size=checkpoint.vocab_size, kv_dtype=checkpoint.dtype)
    info = ServingInfo(
        model_names=names,
        created=int(time.time()),
        max_model_len=max_model_len,
        block_size=engine.block_size,
        num_blocks=num_blocks,
        vocab_size=checkpoint.vocab_size,
        settings={
            "model": arguments.model,
            "dtype": checkpoint.dtype,
            "load_format": engine.load_format,
            "executor": engine.executor,
            "block_size": engine.block_size,
            "num_blocks": num_blocks,
            "max_model_len": max_model_len,
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "enable_prefix_caching": engine.enable_prefix_caching,
            "share_pending_prefixes": engine.share_pending_prefixes,
            "max_pinned_share": engine.max_pinned_share,
            "scheduling_policy": engine.scheduling_policy,
            "long_prefill_token_threshold": engine.long_prefill_token_threshold,
            "max_waiting_requests": engine.max_waiting_requests,
            "max_waiting_tokens": engine.max_waiting_tokens,
            "request_timeout": arguments.request_timeout,
            "kv_events_endpoint": engine.kv_events.endpoint if engine.kv_events else None,
            "data_dir": arguments.data_dir,
        },
    )
    return config, info


def _resolve_sizes(arguments: argparse.Namespace, checkpoint: CheckpointInfo) -> tuple[int, int]:
    """(max_model_len, num_blocks) that fit each other."""
    block_size = arguments.block_size
    asked = arguments.max_model_len
    if asked is not None and asked > checkpoint.max_model_len:
        raise CheckpointError(f"--max-model-len {asked} is more than the model's {checkpoint.max_model_len}")
    wanted = asked or checkpoint.max_model_len
    num_blocks = arguments.num_blocks or default_num_blocks(checkpoint, block_size=block_size, max_model_len=wanted)
    capacity = (num_blocks - 1) * block_size
    if capacity < 2:
        raise CheckpointError(f"--num-blocks {num_blocks} leaves no room: the null block takes one")
    if wanted <= capacity:
        return wanted, num_blocks
    if asked is not None:
        raise CheckpointError(
            f"--max-model-len {asked} does not fit the KV cache of {capacity} tokens "
            f"({num_blocks} blocks of {block_size}, one of them the null block)"
        )
    log.info("config.context_shortened", max_model_len=capacity, model_max_len=wanted, num_blocks=num_blocks)
    return capacity, num_blocks


async def run_server(
    config: HouseConfig,
    info: ServingInfo,
    options: AppOptions,
    server: ServerConfig,
    keys: KeyStore,
    ledger_config: LedgerConfig,
    tracing: TracingConfig | None,
    *,
    host: str,
    port: int,
    grace_s: float,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain for at most `grace_s`.

    Raises EngineGivenUp, LedgerError and TracingError.
    """
    async with (
        reloading_on_hangup(keys),
        open_ledger(ledger_config) as ledger,
        open_tracer(tracing) as tracer,
        split(config, info, ledger.journal) as house,
        trio.open_nursery() as watching,
    ):
        install_gauges(ledger, house.metrics.registry)
        tracer.count_in(house.metrics.registry)
        ledger.counters = lambda: parse_metrics(house.metrics.render().decode())
        stopping = trio.Event()
        watching.start_soon(_wait_signal, stopping)
        async with trio.open_nursery() as serving:
            addresses: list[Address] = await serving.start(
                partial(
                    serve,
                    make_app(
                        house.desk,
                        options,
                        keys,
                        tracer,
                        usage=LedgerUsage(ledger_config.data_dir, ledger_config.url),
                    ),
                    host=host,
                    port=port,
                    config=server,
                    shutdown_trigger=partial(_drain, house, stopping, grace_s),
                )
            )
            log.info("server.listening", url=[address.url for address in addresses], model=list(info.model_names))
            _calm_collector()
        watching.cancel_scope.cancel()  # it would wait for another signal for ever


async def _wait_signal(stopping: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            if stopping.is_set():
                log.warning("server.killed", signal=signal.Signals(number).name)
                os._exit(128 + number)  # asked twice
            log.info("server.stopping", signal=signal.Signals(number).name)
            stopping.set()


async def _drain(house: House, stopping: trio.Event, grace_s: float) -> None:
    await stopping.wait()
    await house.desk.drain(grace_s)


def _calm_collector() -> None:
    """What lives now lives for ever: keep the garbage collector from walking it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)


def _model_name(model: str) -> str:
    """What clients call it: a hub id as it stands, a folder by its own name."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{value} is not a port")
    return value


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
