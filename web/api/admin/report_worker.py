"""The program of a process that reads the ledger and makes one usage report after the other.

`report_process.py` starts it, talks to it over its standard input, a socket, and kills it. Fetching rows, summing and
rendering hold the interpreter lock, for which nobody waits here.

    where    length (8 bytes) and a pickled `Where`
    report   length; a pickled `Report` (`reports.py`)
    answer   kind (1 byte) and length; the body, or why there is none

What must always hold: this process ends when its parent does; it never uses more memory than `MEMORY_BYTES`; SIGINT
interrupts what it reads, on a database server too.
"""

from __future__ import annotations

import pickle
import signal
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import attrs
import orjson
from sqlalchemy.exc import SQLAlchemyError

from quipu.actors.fleet.processes.child import Read, become_child
from quipu.actors.ledger.database import reason
from quipu.actors.ledger.reading import KeptEngines, LedgerError, open_reader

from .reports import Report, ReportRefused

MEMORY_BYTES: Final = 1 << 30
"""Address space of one process: some 200,000 groups of a report."""
MAX_BODY_BYTES: Final = 32 << 20
LENGTH: Final = struct.Struct("<Q")
HEAD: Final = struct.Struct("<BQ")


@attrs.frozen
class Where:
    """Where the ledger is, as in LedgerConfig."""

    data_dir: Path
    url: str | None


class Answer(IntEnum):
    READY = 0
    MADE = 1
    REFUSED = 2
    """The client asked for what cannot be made: message, parameter and code as JSON."""
    AWAY = 3
    """Why the ledger cannot be read."""
    FAILED = 4
    """Where an error of ours was raised."""


def frame_of(value: object) -> bytes:
    """Return a value pickled, after its length."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def main() -> None:
    try:
        link, read = become_child(MEMORY_BYTES)
        where: Where = _receive(read)
        engines = KeptEngines()
        link.sendall(HEAD.pack(Answer.READY, 0))
        while True:
            report: Report = _receive(read)
            kind, data = make(report, where, engines)
            link.sendall(HEAD.pack(kind, len(data)))
            link.sendall(data)
            del report, data
    except (EOFError, OSError):
        pass  # the parent is gone
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client is gone; another process will make the next report


def make(report: Report, where: Where, engines: KeptEngines) -> tuple[Answer, bytes]:
    """Return the answer to a report."""
    try:
        with open_reader(data_dir=where.data_dir, url=where.url, engines=engines) as reader:
            data = report.make(reader)
    except ReportRefused as refused:
        return _refused(refused.message, refused.param, refused.code)
    except MemoryError:
        return _refused("The report needs too much memory. Ask for a shorter range or fewer groups.", None, _TOO_LARGE)
    except SQLAlchemyError as error:
        return Answer.AWAY, reason(error).encode()
    except (LedgerError, OSError) as error:
        return Answer.AWAY, str(error).encode()
    except Exception as error:
        return Answer.FAILED, _place_of(error).encode()
    if len(data) > MAX_BODY_BYTES:
        size = f"{len(data) / (1 << 20):.0f} MiB; at most {MAX_BODY_BYTES >> 20} are sent"
        return _refused(f"The report has {size}. Ask for a shorter range or fewer groups.", None, _TOO_LARGE)
    return Answer.MADE, data


_TOO_LARGE: Final = "report_too_large"


def _refused(message: str, param: str | None, code: str) -> tuple[Answer, bytes]:
    return Answer.REFUSED, orjson.dumps([message, param, code])


def _place_of(error: Exception) -> str:
    """Return the type of an error and where it was raised, without its message, which may quote a client."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
    return type(error).__name__ + where


def _receive(read: Read) -> Any:
    (num_bytes,) = LENGTH.unpack(read(LENGTH.size))
    return pickle.loads(read(num_bytes))  # noqa: S301 - the socket's other end is the parent alone


if __name__ == "__main__":
    main()
