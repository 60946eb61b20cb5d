"""`quipu top [URL]`: what a running server does, live in the terminal, from what it answers to anybody with its key.

On a terminal a screen that is drawn anew; elsewhere a line, or with `--json` an object, for each reading. Exit codes: 0
if it was told to end, 1 if no server was there at the beginning, 2 for invalid flags, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Final

import attrs
import orjson
import trio
from rich.console import Console
from rich.live import Live

from quipu.actors.config.declarations import Bounds
from quipu.actors.shared.terminals import can_redraw, has_colors

from ..command_output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, complain
from ..one_line_parser import OneLineParser
from ..server_flags import ADMIN_KEY_VARIABLE, KEY_VARIABLE, url, visible
from ..setting_flags import number
from .figures import make_figures
from .pressed_keys import heard_keys, wait_quit
from .screen import make_screen
from .server_reader import NotReachable, ServerReader, make_client
from .view import Outage, View, document_of, line_of, outage_words, rows_of

INTERVAL_S: Final = 2.0


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` is without `top`. Returns the exit code."""
    arguments: argparse.Namespace = make_parser().parse_args(argv)
    try:
        key = arguments.api_key or visible(os.environ.get(ADMIN_KEY_VARIABLE) or os.environ.get(KEY_VARIABLE) or "")
    except argparse.ArgumentTypeError as error:
        return complain(f"{ADMIN_KEY_VARIABLE} or {KEY_VARIABLE}: {error}", EXIT_USAGE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    is_drawn = can_redraw(sys.stdout) and not (arguments.json or arguments.once)
    code = 0
    try:
        code = trio.run(_draw if is_drawn else _print, arguments, headers)
    except* KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except* NotReachable as group:
        advice = "start one with `quipu serve`, or name another: quipu top URL"
        code = complain(f"no server at {arguments.url}: {group.exceptions[0]}; {advice}", EXIT_FAILED)
    return code


def make_parser() -> OneLineParser:
    parser = OneLineParser(prog="quipu top", description="Show what a running server does, live. `q` quits.")
    add = parser.add_argument
    server_help = "the server (default: %(default)s)"
    add("url", nargs="?", type=url, default="http://127.0.0.1:8000", metavar="URL", help=server_help)
    key_help = (
        f"an admin key sees everything, another one its tenant's share (default: ${ADMIN_KEY_VARIABLE}, or "
        f"${KEY_VARIABLE})"
    )
    add("--api-key", type=visible, metavar="KEY", help=key_help)
    seconds = number(Bounds(minimum=0.1, maximum=3600))
    add("-n", "--interval", type=seconds, default=INTERVAL_S, metavar="SECONDS", help="time between two readings")
    add("--once", action="store_true", help="print the numbers of one interval, and end")
    add("--json", action="store_true", help="print an object in a line for each reading")
    return parser


async def watch(reader: ServerReader, base_url: str, interval_s: float) -> AsyncGenerator[View]:
    """Yield a view after each attempt to read the server. Raises NotReachable if the first attempt fails."""
    view = View(base_url, _time(), interval_s)
    while True:
        began_s = trio.current_time()
        try:
            now = await reader.read()
        except NotReachable as error:
            if view.reading is None:
                raise
            since = view.outage.since if view.outage is not None else _time()
            view = attrs.evolve(view, time=_time(), outage=Outage(since, str(error)))
        else:
            figures = make_figures(view.reading, now)
            view = View(base_url, _time(), interval_s, reading=now, figures=figures)
        yield view
        await trio.sleep_until(began_s + interval_s)


async def _print(arguments: argparse.Namespace, headers: dict[str, str]) -> int:
    """Print a line for each reading. With `--once` one report, which takes two readings to have rates."""
    async with make_client(headers) as http:
        views = watch(ServerReader(http, arguments.url), arguments.url, arguments.interval)
        async with aclosing(views):
            async for view in views:
                has_rates = view.figures is None or view.figures.period_s is not None or view.outage is not None
                if arguments.once and not has_rates:
                    continue
                print(_text(view, arguments), flush=True)
                if arguments.once:
                    return 0 if view.outage is None else EXIT_FAILED
    return 0


def _text(view: View, arguments: argparse.Namespace) -> str:
    if arguments.json:
        return orjson.dumps(document_of(view)).decode()
    if not arguments.once:
        return line_of(view)
    lines = [f"{view.base_url}  {view.reading.state if view.reading is not None else 'unknown'}  {view.time}"]
    lines += [] if view.outage is None else [outage_words(view.outage)]
    lines += [] if view.reading is None else view.reading.refusals
    return "\n".join([*lines, *(f"{name:<12}{text}" for name, text in rows_of(view))])


async def _draw(arguments: argparse.Namespace, headers: dict[str, str]) -> int:
    """Draw a screen until somebody quits."""
    console = Console(
        file=sys.stdout,
        force_terminal=True,
        color_system="standard" if has_colors(sys.stdout) else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    async with make_client(headers) as http:
        views = watch(ServerReader(http, arguments.url), arguments.url, arguments.interval)
        async with aclosing(views):
            first = await anext(views)  # before the screen is taken: without a server there is none
            return await _draw_all(console, first, views)


async def _draw_all(console: Console, first: View, views: AsyncIterator[View]) -> int:
    latest = first
    code = 0
    with heard_keys() as fileno, Live(console=console, screen=True, auto_refresh=False) as live:

        def draw() -> None:
            live.update(make_screen(latest, console.size.height), refresh=True)

        async def follow() -> None:
            nonlocal latest
            async for view in views:
                latest = view
                draw()

        async def obey_signals() -> None:
            nonlocal code
            with trio.open_signal_receiver(signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP) as signals:
                async for received in signals:
                    if received != signal.SIGWINCH:
                        code = 128 + received
                        nursery.cancel_scope.cancel()
                    draw()

        async with trio.open_nursery() as nursery:
            draw()
            nursery.start_soon(follow)
            nursery.start_soon(obey_signals)
            await wait_quit(fileno)
            nursery.cancel_scope.cancel()
    return code


def _time() -> str:
    return datetime.now().astimezone().strftime("%H:%M:%S")
