"""`quipu serve`: the runtime and the HTTP server in one nursery, from start to stop.

Stops in three steps on SIGTERM or SIGINT: ask (drain), wait (grace period), kill. `serve_command.py` imports it once
the flags are read.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import structlog
import trio

from quipu.actors.config.runtime_config import RuntimeConfig
from quipu.actors.fleet.processes.child import kill_children
from quipu.actors.fleet.processes.log_writer import LogWriter, is_for_people
from quipu.actors.fleet.supervisor import EngineGivenUp, EngineRefusal
from quipu.actors.last_records import wait_accounts_closed
from quipu.actors.ledger.database import LedgerError
from quipu.actors.ledger.service import LedgerConfig, open_ledger
from quipu.actors.request_desk.desk import RequestDesk
from quipu.actors.request_desk.health import Health
from quipu.actors.request_desk.interface import ServingInfo
from quipu.actors.response_store.response_store import StoreConfig, open_store_if
from quipu.actors.response_store.stored import StoreError
from quipu.actors.restarts import ActorGivenUp
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.actors.shared.error_groups import first_leaf
from quipu.actors.threads import outlive_shortages
from quipu.actors.wiring import split

from ..api.admin.prices import PriceError, PriceList, read_prices
from ..api.admin.usage_source import open_usage
from ..app import make_app
from ..auth.browser_rules import BrowserRules, is_loopback
from ..auth.key_file import KeyFileError
from ..auth.keys import KeyStore
from ..auth.sealed_texts import kept_seal
from ..batches.store_database import BatchStoreError
from ..http.connection_table import default_max_connections, raise_file_limit
from ..http.server import Address, ServerConfig, serve
from ..options import AppOptions
from ..telemetry import logs
from ..telemetry.loop_watch import watch_loop
from ..telemetry.metric_names import VLLM_NAMES
from ..telemetry.tracing_config import TracingConfig, TracingError, open_tracer, tracing_config
from .batch_flags import batch_settings, make_batches, running_batches
from .command_output import EXIT_FAILED, EXIT_USAGE
from .exported_metrics import export_metrics, kept_counters
from .keys import API_KEY_VARIABLE, key_store, note_hangups, reloading_on_hangup
from .ledger_flags import ledger_config, ledger_settings
from .response_flags import store_config, store_settings
from .self_check import SelfCheckedApp
from .service_manager import POLL_S, find_manager, notify
from .settings import resolve_config
from .upstream_flags import UpstreamError, read_upstreams

log = structlog.get_logger("quipu.cli")

_OPENABLE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the addresses are shown, not listened on
KEY_OF_VLLM = "VLLM_API_KEY"
GC_THRESHOLDS = (2_000, 10, 50)
SWITCH_INTERVAL_S = 0.0005
"""How long a thread that runs Python may keep the interpreter lock from the event loop. The loop releases it at every
write to a socket, and would wait for Python's default of five milliseconds each time."""
LAST_WORDS_S = 0.2
"""How long the second signal waits for the log to be written."""
CLOSING_S = 2.0
"""How long connections may take to end after the drain, when all generation has ended."""


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve according to the flags; return the exit code."""
    log_writer = logs.configure(arguments.log_level)
    try:
        return _serve(arguments, log_writer)
    finally:
        log_writer.drain()


def _serve(arguments: argparse.Namespace, log_writer: LogWriter) -> int:
    if arguments.kv_events_config is not None and not arguments.enable_prefix_caching:
        log_writer.say("--kv-events-config needs prefix caching, without which there are no events")
        return EXIT_USAGE
    try:
        keys = key_store(arguments, os.environ)
        note_hangups(keys)
        ledger = ledger_config(arguments, os.environ)
        tracing = tracing_config(arguments.otlp_traces_endpoint, os.environ)
        stored = store_config(arguments)
        prices = None if arguments.prices is None else read_prices(arguments.prices)
        config, info = resolve_config(arguments, read_upstreams(arguments, os.environ))
        raise_file_limit()
        files_each = 2 if config.upstreams else 1  # a request that is passed on has a connection to its upstream, too
        max_connections = arguments.max_connections or default_max_connections(files_each)
        resolved = (
            ledger_settings(ledger)
            | store_settings(arguments)
            | batch_settings(arguments)
            | {
                "max_connections": max_connections,
                "open_admin": arguments.open_admin,
                "serves_ui": not arguments.no_ui,
                "allowed_hosts": sorted(arguments.allowed_hosts),
                "allowed_origins": sorted(arguments.allowed_origins),
            }
        )
        info = attrs.evolve(info, settings=info.settings | resolved)
    except (CheckpointError, KeyFileError, LedgerError, PriceError, TracingError, UpstreamError) as error:
        log_writer.say(str(error))
        return EXIT_USAGE
    warn_where_open(arguments.host, keys)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server = ServerConfig(graceful_timeout_s=CLOSING_S, max_connections=max_connections)
    failure: str | None = None
    try:
        trio.run(run_server, arguments, config, info, server, keys, ledger, tracing, prices, stored, log_writer)
    except* (
        EngineRefusal,
        ActorGivenUp,
        BatchStoreError,
        CheckpointError,
        KeyFileError,
        LedgerError,
        StoreError,
        TracingError,
    ) as group:
        failure = str(first_leaf(group))
    except* EngineGivenUp as group:
        failure = f"the engine is given up: {first_leaf(group)}"
    except* OSError as group:
        failure = f"cannot listen on {arguments.host} port {arguments.port}: {first_leaf(group)}"
    if failure is not None:
        log_writer.say(failure)
        return EXIT_FAILED
    return 0


def warn_where_open(host: str, keys: KeyStore) -> None:
    """Warn the operator if a server without keys can be reached from elsewhere."""
    if keys.is_open and not is_loopback(host):
        message = "anyone who reaches this address can use the server: it has no API keys (docs/operate/keys.md)"
        if KEY_OF_VLLM in os.environ:
            message += f"; {KEY_OF_VLLM} is not read: call it {API_KEY_VARIABLE}"
        log.warning("server.open", host=host, detail=message)


def app_options(arguments: argparse.Namespace, keys: KeyStore) -> AppOptions:
    return AppOptions(
        open_admin=arguments.open_admin,
        serves_ui=not arguments.no_ui,
        browsers=browser_rules(arguments, has_keys=not keys.is_open),
        allow_client_priority=arguments.allow_client_priority,
        always_include_usage=arguments.always_include_usage,
        shows_vllm_metrics=arguments.metric_names == VLLM_NAMES,
        keep_billing_header=arguments.keep_billing_header,
        request_timeout_s=arguments.request_timeout,
        lora_dir=arguments.lora_dir,
        max_body_bytes=arguments.max_body_bytes,
        max_body_memory_bytes=arguments.max_body_memory,
    )


def browser_rules(arguments: argparse.Namespace, *, has_keys: bool) -> BrowserRules:
    """Return the rules for hosts and origins: with keys, those of the flags; without, cross-site pages are refused."""
    checks_hosts = bool(arguments.allowed_hosts) or (not has_keys and is_loopback(arguments.host))
    return BrowserRules(
        allowed_hosts=frozenset(arguments.allowed_hosts) if checks_hosts else None,
        allowed_origins=arguments.allowed_origins,
        refuse_cross_site=not has_keys,
    )


async def run_server(
    arguments: argparse.Namespace,
    config: RuntimeConfig,
    info: ServingInfo,
    server: ServerConfig,
    keys: KeyStore,
    ledger_config: LedgerConfig,
    tracing: TracingConfig | None,
    prices: PriceList | None,
    stored: StoreConfig | None,
    log_writer: LogWriter,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises EngineGivenUp, LedgerError, StoreError and TracingError."""
    manager = find_manager(os.environ)
    options = app_options(arguments, keys)
    async with trio.open_nursery() as watching:
        async with (
            reloading_on_hangup(keys),
            open_ledger(ledger_config) as ledger,
            open_tracer(tracing) as tracer,
            open_usage(ledger_config.data_dir, ledger_config.url) as usage,
            open_store_if(stored) as store,
            split(config, info, ledger.journal) as runtime,
        ):
            ledger.counters = lambda: kept_counters(runtime.metrics.render().decode())
            stopping = trio.Event()
            watching.start_soon(_wait_signal, stopping, log_writer)
            batches = make_batches(arguments, usage)
            options = attrs.evolve(options, seal=kept_seal(ledger_config.data_dir))
            whole_app = make_app(
                runtime.desk, options, keys, tracer, usage=usage, prices=prices, store=store, batches=batches
            )
            export_metrics(runtime.metrics.registry, ledger, tracer, store, log_writer, whole_app.answers)
            async with running_batches(batches, whole_app), trio.open_nursery() as serving:
                app = SelfCheckedApp(whole_app, runtime.desk)
                drain = partial(_drain, runtime.desk, stopping, arguments.shutdown_timeout)
                addresses: list[Address] = await serving.start(
                    partial(serve, app, host=arguments.host, port=arguments.port, config=server, shutdown_trigger=drain)
                )
                watching.start_soon(app.check, url_to_open(addresses, serves_ui=False))
                watch = partial(watch_loop, runtime.metrics.event_loop_lag)
                watching.start_soon(outlive_shortages, watch, "loop watch")
                if manager is not None:
                    tell = partial(notify, manager, runtime.desk.health, stopping)
                    watching.start_soon(outlive_shortages, tell, "service manager")
                names, urls = runtime.desk.info.model_names, [address.url for address in addresses]
                log.info("server.listening", url=urls, model=list(names))
                url = url_to_open(addresses, serves_ui=options.serves_ui)
                watching.start_soon(announce, url, runtime.desk.health, log_writer)
                _calm_collector()
            await wait_accounts_closed(runtime.entry_store)
        # Only now that all accounts are closed: until then a second signal must kill the server, without a
        # KeyboardInterrupt.
        watching.cancel_scope.cancel()


async def _wait_signal(stopping: trio.Event, log_writer: LogWriter) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            if stopping.is_set():
                log.warning("server.killed", signal=signal.Signals(number).name)
                kill_children()  # a hanging child would not notice the end of its parent
                log_writer.drain(LAST_WORDS_S)
                os._exit(128 + number)  # second signal
            log.info("server.stopping", signal=signal.Signals(number).name)
            stopping.set()


async def _drain(desk: RequestDesk, stopping: trio.Event, grace_s: float) -> None:
    await stopping.wait()
    await desk.drain(grace_s)


def url_to_open(addresses: Sequence[Address], *, serves_ui: bool) -> str:
    """Return the URL of the pages, or of the server if it has none; an address for all interfaces becomes loopback."""
    first = min(addresses, key=lambda address: ":" in address.host)  # IPv4 if there is any
    url = Address(_OPENABLE.get(first.host, first.host), first.port).url
    return f"{url}/ui" if serves_ui else url


async def announce(url: str, health: Callable[[], Health], log_writer: LogWriter) -> None:
    """Say where the server is once it is ready: to people on a line of its own, otherwise as `server.ready`."""
    while True:
        if health().is_ready:
            break
        await trio.sleep(POLL_S)
    if is_for_people():
        log_writer.put(f"ready: {url}\n".encode("utf-8", "replace"))
    else:
        log.info("server.ready", url=url, detail=f"ready: {url}")


def _calm_collector() -> None:
    """Keep the garbage collector from walking the objects that exist now, which live as long as the process.

    A request leaves some dozens of objects in cycles, and freeing them takes far longer than walking them: with a
    threshold of 50,000 young objects, 1,000 short requests blocked the loop for 70 to 95 ms. So it collects more often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
