"""The form of log lines, the same for every process of a server: JSON, or text for people if stderr is a terminal.

Used by `web/telemetry/logs.py` and `engine_server.py`. What must always hold: values of local variables never reach a
log, since they may quote what a client sent.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson
import structlog

from .log_writer import Relay


def is_for_people() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def processors() -> list[Any]:
    """Return structlog's processors, with the renderer that fits stderr."""
    common: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if is_for_people():
        # The default renderer of exceptions shows local variables.
        return [*common, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    json = structlog.processors.JSONRenderer(orjson.dumps, option=orjson.OPT_NON_STR_KEYS)
    return [*common, structlog.processors.format_exc_info, json]


def relay_libraries(level: int) -> None:
    """Log what libraries log from `level` up, warnings at least: their handlers would block on an unread stderr."""
    root = logging.getLogger()
    root.setLevel(max(logging.WARNING, level))
    if not any(isinstance(handler, Relay) for handler in root.handlers):
        root.addHandler(Relay())
    logging.captureWarnings(True)
