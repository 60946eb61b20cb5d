"""The flags of adapters (LoRA), by vLLM's names, and what they mean together.

What must always hold: a flag that has no effect is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from quipu.actors.config.declarations import settings_of
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.request_desk.adapters import NAME_RULE, is_adapter_name
from quipu.actors.shared.checkpoint import DEMO_ADAPTER, DEMO_ADAPTER_NAME, CheckpointError

from .one_line_parser import folder as named_folder

DEFAULT_ADAPTERS = 4
DEFAULT_RANK = 16


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    """What vLLM's flag says of an adapter."""

    name: str
    path: str
    base_model_name: str | None = None
    """Of the model card; there is one model here."""


def add_lora_flags(add: Callable[..., Any]) -> None:
    add(
        "--enable-lora",
        action="store_true",
        help="serve adapters (docs/operate/adapters.md); --lora-modules implies it",
    )
    add(
        "--lora-modules",
        type=_module,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=FOLDER",
        help="adapters to serve from the start, as PEFT saves them, and the names by which clients ask for them; the "
        "folder `demo-pirate` is part of the package, an adapter of `demo`",
    )
    add(
        "--lora-dir",
        type=lambda text: Path(named_folder(text)),
        metavar="FOLDER",
        help="where adapters must lie that are loaded while the server runs (POST /v1/load_lora_adapter)",
    )


def resolve_adapters(arguments: argparse.Namespace, model_names: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of engine and server that concern adapters. Raises CheckpointError."""
    modules: dict[str, str] = {}
    for name, folder in arguments.lora_modules:
        if name in modules:
            raise CheckpointError(f"--lora-modules names {name} twice")
        if name in model_names:
            raise CheckpointError(f"--lora-modules {name}: the model itself has this name")
        modules[name] = str(folder.expanduser().absolute())
    is_enabled = arguments.enable_lora or bool(modules)
    needing = {each.destination: each.flags[0] for each in settings_of(EngineConfig) if each.group == "adapters"}
    for name, flag in {**needing, "lora_dir": "--lora-dir"}.items():
        if getattr(arguments, name) is not None and not is_enabled:
            raise CheckpointError(f"{flag} needs --enable-lora or --lora-modules")
    if arguments.lora_dir is not None and not arguments.lora_dir.is_dir():
        raise CheckpointError(f"--lora-dir {arguments.lora_dir} is not a folder")
    most = arguments.max_loras or max(DEFAULT_ADAPTERS, len(modules))
    if len(modules) > most:
        raise CheckpointError(f"--lora-modules names {len(modules)} adapters, and --max-loras is {most}")
    return {
        "max_loras": most if is_enabled else 0,
        "max_lora_rank": (arguments.max_lora_rank or DEFAULT_RANK) if is_enabled else 0,
        "lora_modules": modules,
    }


def refuse_without_engines(arguments: argparse.Namespace) -> None:
    """Raises CheckpointError for flags of adapters on a server whose upstreams alone serve."""
    if arguments.enable_lora or arguments.lora_modules or arguments.lora_dir or arguments.max_loras:
        raise CheckpointError("adapters are applied by engines, and with --upstream alone there are none")


def _module(text: str) -> tuple[str, Path]:
    """Parse NAME=FOLDER, or vLLM's JSON object with a `name` and a `path`. Raises ArgumentTypeError."""
    if text.lstrip().startswith("{"):
        try:
            module = msgspec.json.decode(text, type=_Module)
        except msgspec.MsgspecError as error:
            raise argparse.ArgumentTypeError(f"must be NAME=FOLDER, or an object with them: {error}") from None
        name, folder = module.name, module.path
    else:
        name, _, folder = text.partition("=")
    if not folder or not is_adapter_name(name):
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER, where NAME has {NAME_RULE}")
    return name, DEMO_ADAPTER if folder == DEMO_ADAPTER_NAME else Path(folder)
