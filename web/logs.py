"""The log of the whole process, configured once by the command line.

One JSON object a line on stderr, or coloured text where stderr is a terminal. What is logged is decided where it
happens; here is only its form.

What must always hold: values of local variables never reach a log, since they may be what a client sent.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson
import structlog


def configure(level: str) -> None:
    """Log from `level` ("debug", "info", ...) upwards. Raises ValueError for a level that does not exist."""
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise ValueError(f"no such log level: {level}")
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    logger_factory: Any
    if sys.stderr.isatty():
        # The default renderer of exceptions shows local variables.
        plain = structlog.dev.plain_traceback
        processors.append(structlog.dev.ConsoleRenderer(exception_formatter=plain))
        logger_factory = structlog.PrintLoggerFactory(sys.stderr)
    else:
        processors.append(structlog.processors.format_exc_info)
        processors.append(structlog.processors.JSONRenderer(orjson.dumps, option=orjson.OPT_NON_STR_KEYS))
        logger_factory = structlog.BytesLoggerFactory(sys.stderr.buffer)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(levels[level.upper()]),
        logger_factory=logger_factory,
        cache_logger_on_first_use=True,
    )
