"""`quipu keys new` and `quipu keys hash`, and the flags and variables by which `quipu serve` gets its keys.

Keys from flags and the environment are hashed as they are read, so that the command line passes on no key. Errors never
show the input.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import trio

from quipu.actors.threads import run_in_thread

from ..auth.key_file import KeyEntry, KeyFileError, check_entry, hash_key, new_key, render_entry
from ..auth.keys import KeyStore, given_keys
from .command_output import complain
from .one_line_parser import OneLineParser, add_command
from .server_flags import ADMIN_KEY_VARIABLE

API_KEY_VARIABLE = "QUIPU_API_KEY"

log = structlog.get_logger("quipu.keys")


def add_key_flags(add: Callable[..., Any]) -> None:
    key = partial(add, type=_hashed, action="append", default=[], metavar="KEY")
    key(
        "--api-key",
        help=f"require this key on every route but /health and /ready; may be repeated; also ${API_KEY_VARIABLE}",
    )
    key(
        "--admin-key",
        help=f"a key that may also use /metrics and other admin routes; may be repeated; also ${ADMIN_KEY_VARIABLE}",
    )
    add("--key-file", type=Path, metavar="FILE", help="hashes of keys and their owners; read again on SIGHUP")


def key_store(arguments: argparse.Namespace, environment: MutableMapping[str, str]) -> KeyStore:
    """Return the keys of a server. Removes them from `environment`, which children inherit. Raises KeyFileError."""
    hashes = {API_KEY_VARIABLE: list(arguments.api_key), ADMIN_KEY_VARIABLE: list(arguments.admin_key)}
    for variable, given in hashes.items():
        if (key := environment.pop(variable, None)) is not None:
            try:
                given.insert(0, _hashed(key))
            except argparse.ArgumentTypeError as error:
                raise KeyFileError(f"{variable}: {error}") from None
    return KeyStore(given_keys(*hashes.values()), arguments.key_file)


def note_hangups(keys: KeyStore) -> None:
    """Keep a SIGHUP that comes before `reloading_on_hangup` for it, if there is a key file: loading may take long."""

    def note(*_: object) -> None:
        keys.is_stale = True

    if keys.path is not None:
        signal.signal(signal.SIGHUP, note)


@asynccontextmanager
async def reloading_on_hangup(keys: KeyStore) -> AsyncIterator[None]:
    """Read the key file again on every SIGHUP during the block. A file that cannot be used changes nothing.

    Without a key file SIGHUP keeps its meaning: it ends the process.
    """
    async with trio.open_nursery() as nursery:
        if keys.path is not None:
            await nursery.start(_reload_on_hangup, keys)
        yield
        nursery.cancel_scope.cancel()


async def _reload_on_hangup(keys: KeyStore, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        if keys.is_stale:
            await _reload(keys)
        async for _ in signals:
            await _reload(keys)


async def _reload(keys: KeyStore) -> None:
    try:
        await run_in_thread(keys.reload, abandon_on_cancel=True)
    except KeyFileError as error:
        log.error("keys.not_reloaded", error=str(error), **keys.describe())
    else:
        log.info("keys.reloaded", **keys.describe())


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` is without `keys`. Returns the exit code."""
    return run_keys(make_parser().parse_args(argv))


def make_parser() -> OneLineParser:
    parser = OneLineParser(prog="quipu keys", description="Create API keys for a key file.")
    actions = parser.add_subparsers(dest="action", required=True)
    new = add_command(actions, "new", "create a key: prints its entry to stdout and the key itself, once, to stderr")
    new.add_argument("--tenant", required=True, help="who pays, and whose cache its requests share")
    new.add_argument("--name", required=True, help="what the key is called in reports and in the log")
    new.add_argument("--admin", action="store_true", help="may also use admin routes")
    new.add_argument("--priority", action="store_true", help="its requests may set a `priority`")
    new.add_argument("--adapters", nargs="*", metavar="NAME", help="the adapters that it may use (default: all)")
    add_command(actions, "hash", "read a key from stdin and print its hash for the key file")
    return parser


def run_keys(arguments: argparse.Namespace) -> int:
    """Run `quipu keys`; return the exit code."""
    try:
        if arguments.action == "hash":
            print(_hashed(sys.stdin.read().rstrip("\r\n")))
        else:
            key = new_key(admin=arguments.admin)
            entry = KeyEntry(
                id=f"key-{secrets.token_hex(6)}",
                name=arguments.name,
                tenant=arguments.tenant,
                admin=arguments.admin,
                priority=arguments.priority,
                adapters=None if arguments.adapters is None else tuple(arguments.adapters),
                sha256=hash_key(key),
            )
            check_entry(entry, "the entry")
            print(render_entry(entry))
            print(f"The key, which is shown only once: {key}", file=sys.stderr)
    except (KeyFileError, argparse.ArgumentTypeError) as error:
        return complain(error)
    return 0


def _hashed(key: str) -> str:
    """Return the hash of a key that was entered. Raises ArgumentTypeError, whose message does not show the key."""
    if not key:
        raise argparse.ArgumentTypeError("the key is empty")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise argparse.ArgumentTypeError("a key must have only printable ASCII characters and no spaces")
    return hash_key(key)
