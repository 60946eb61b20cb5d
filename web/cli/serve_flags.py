"""The flags of `quipu serve`, by vLLM's names where it has them. Used by `serve_command.py`.

Those of the engine are made from its settings (`setting_flags.py`); those of the web layer are written here. The model
is an argument or, as for other servers, a flag; two different ones are refused.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from quipu.actors.config.declarations import Bounds

from ..auth.browser_rules import parse_hosts, parse_origins
from ..options import AppOptions
from ..telemetry.metric_names import OWN_NAMES, VLLM_NAMES
from .batch_flags import add_batch_flags
from .generation_config import AUTO
from .keys import add_key_flags
from .ledger_flags import add_ledger_flags
from .lora_flags import add_lora_flags
from .one_line_parser import filled, folder
from .response_flags import add_store_flags
from .setting_flags import GROUPS, add_settings, integer, number, parse_size
from .upstream_flags import add_upstream_flags

OPTIONS = AppOptions()


class _Default(str):
    """A model that nobody has named."""

    __slots__ = ()


DEFAULT_MODEL = _Default("demo")


class ModelAction(argparse.Action):
    """Takes the model, unless that is the default and another one is known."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        known = getattr(namespace, self.dest, DEFAULT_MODEL)
        if isinstance(values, _Default):
            return
        if not isinstance(known, _Default) and known != values:
            parser.error(f"two models are named: {known} and {values}")
        setattr(namespace, self.dest, values)


def add_serve_flags(command: argparse.ArgumentParser) -> None:
    """Add all flags in the order and groups of `--help`."""
    model_help = (
        "a folder, a GGUF file, a hub id (owner/name, or owner/name:Q4_K_M for GGUF), or `demo` (the default), "
        "which is part of the package"
    )
    # as a flag too, like vLLM and SGLang
    model = partial(command.add_argument, default=DEFAULT_MODEL, action=ModelAction)
    model("model", nargs="?", metavar="MODEL", help=model_help)
    model(
        "--model", "--model-path", dest="model", metavar="MODEL", help="the same, as a flag"
    )  # as for vLLM and SGLang
    add = command.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    port = integer(Bounds(minimum=0, maximum=65535))
    add("--port", type=port, default=8000, help="port to listen on; 0 takes a free one")
    add(
        "--served-model-name",
        type=filled,
        nargs="+",
        metavar="NAME",
        help="names that clients may ask for (default: the model's)",
    )
    add(
        "--generation-config",
        type=folder,
        default=AUTO,
        metavar="auto|vllm|FOLDER",
        help="where defaults of sampling fields come from: the checkpoint's generation_config.json (auto, the "
        "default), nowhere (vllm), or that file in a folder",
    )
    _add_group(command, "engine", "executor")
    _add_group(command, "tiers")
    _add_group(command, "speculation")
    add = command.add_argument_group(GROUPS["adapters"]).add_argument
    add_lora_flags(add)
    add_settings(add, "adapters")
    add = command.add_argument_group("limits of requests").add_argument
    add(
        "--max-connections",
        type=integer(Bounds(minimum=1)),
        metavar="N",
        help="maximum number of connected clients (default: 4096, or as many as there are file descriptors for)",
    )
    size = partial(add, type=parse_size, metavar="SIZE")
    size(
        "--max-body-bytes",
        default=OPTIONS.max_body_bytes,
        help="maximum size of a request body (default: 8MiB; docs/operate/limits.md says why)",
    )
    size(
        "--max-body-memory",
        default=OPTIONS.max_body_memory_bytes,
        help="memory for the bodies of all requests that are not encoded yet; beyond it requests get a 503 "
        "(default: 256MiB)",
    )
    timeout_help = "abort a request that takes longer (default: never)"
    add("--request-timeout", type=number(Bounds(above=0)), metavar="SECONDS", help=timeout_help)
    _add_group(command, "text")
    _add_group(command, "events")
    add = command.add_argument_group("keys, hosts and pages").add_argument
    add_key_flags(add)
    add("--open-admin", action="store_true", help="without keys: serve admin routes to other machines, too")
    hosts_help = (
        "hosts that the `Host` header may name besides loopback's, or `*` (default: none on loopback without keys, "
        "else any)"
    )
    add("--allowed-hosts", type=parse_hosts, action="extend", default=[], metavar="HOST,...", help=hosts_help)
    origins_help = "list of sites whose pages may send requests, such as '[\"https://site.example\"]' (default: none)"
    add("--allowed-origins", type=parse_origins, default=frozenset(), metavar="JSON", help=origins_help)
    add("--no-ui", action="store_true", help="serve no pages at /ui (docs/use/ui.md)")
    prices_help = "prices of tokens, for the usage page (docs/operate/usage-reports.md#cost)"
    add("--prices", type=Path, metavar="FILE", help=prices_help)
    _add_group(command, "supervision", "router", "cache")
    _add_group(command, "cluster")
    add_upstream_flags(command.add_argument_group("upstream servers").add_argument)
    add = command.add_argument_group(GROUPS["log"]).add_argument
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send one span per request to this URL, over OTLP/HTTP (default: OTEL_EXPORTER_OTLP_ENDPOINT, if set)",
    )
    switch = partial(add, action="store_true")
    switch(
        "--allow-client-priority",
        help="let any request set its `priority`; otherwise only keys marked so may (docs/operate/keys.md)",
    )
    add(
        "--metric-names",
        choices=(OWN_NAMES, VLLM_NAMES),
        default=OWN_NAMES,
        help="`vllm`: /metrics has the metrics that vLLM has under its names, too, for dashboards made for it",
    )
    switch("--always-include-usage", help="put usage into every stream, whether or not it was requested")
    switch(
        "--keep-billing-header",
        help="keep the x-anthropic-billing-header of Claude Code's prompts, which then share no prefix across sessions",
    )
    add_settings(add, "log")
    add_batch_flags(command.add_argument_group("files and batches").add_argument)
    add = command.add_argument_group("ledger and shutdown").add_argument
    add("--data-dir", type=folder, default="data", metavar="FOLDER", help="folder for what must outlive the server")
    add_ledger_flags(add)
    add_store_flags(command.add_argument_group("stored responses").add_argument)
    shutdown_help = "how long open requests may take to finish at shutdown (default: %(default)g)"
    add("--shutdown-timeout", type=number(Bounds(minimum=0)), default=30.0, metavar="SECONDS", help=shutdown_help)


def _add_group(command: argparse.ArgumentParser, *groups: str) -> None:
    """Add the settings of some groups, which share a title."""
    add = command.add_argument_group(GROUPS[groups[0]]).add_argument
    for group in groups:
        add_settings(add, group)
