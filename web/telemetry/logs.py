"""The log of the whole process, configured once by the command line.

One JSON object per line on stderr, or coloured text if stderr is a terminal. A thread writes the lines
(`actors/fleet/processes/log_writer.py`).

What must always hold: values of local variables and messages of exceptions never reach a log, since they may quote
what a client sent.
"""

from __future__ import annotations

import atexit
import logging
import traceback
from collections.abc import Iterator

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from quipu.actors.fleet.processes.log_writer import LogLines, LogWriter, processors, relay_libraries, standard_error


def count_in(registry: CollectorRegistry, writer: LogWriter) -> None:
    """Export the number of dropped lines as a metric."""
    registry.register(_Dropped(writer))


class _Dropped(Collector):
    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    def collect(self) -> Iterator[Metric]:
        text = "Lines of the web process's log that could not be written."
        yield CounterMetricFamily("quipu:log_lines_dropped", text, value=float(self._writer.num_dropped))


def configure(level: str) -> LogWriter:
    """Log from `level` ("debug", "info", ...) upwards. Raises ValueError for an unknown level.

    Returns the writer of the lines, which must be drained before the process ends.
    """
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise ValueError(f"unknown log level: {level}")
    writer = LogWriter(standard_error())
    structlog.configure(
        processors=processors(),
        wrapper_class=structlog.make_filtering_bound_logger(levels[level.upper()]),
        logger_factory=LogLines(writer),
        cache_logger_on_first_use=True,
    )
    relay_libraries(levels[level.upper()])
    atexit.register(writer.drain)
    return writer


def frames_of(error: BaseException) -> list[str]:
    """Return where an exception came from, without its message or source lines, which may quote what a client sent."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
