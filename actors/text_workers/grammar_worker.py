"""The program of a process that checks grammars: it receives one tokenizer, then one grammar after the other.

`grammar_process.py` starts it, talks to it over its standard input, a socket, and kills it. The grammar library cannot
be interrupted, and takes as much of a processor as it is given: here both have an end.

    source  length (8 bytes) and the `tokenizer.json`; length and a `WorkerSettings` as JSON
    job     length; kind, source and field of a grammar as a JSON list
    answer  length; a JSON object: empty when the tokenizer is loaded, then the grammar's `text` or an `error`

What must always hold: this process ends when its parent does, and when a grammar takes too much processor time; it
never uses more memory than `MEMORY_BYTES`.
"""

from __future__ import annotations

import json
import signal
import struct
from typing import Any

import attrs

from ..messages.grammar import GrammarKind, GrammarSpec
from ..processes.child import Read, become_child
from ..shared.grammar_library import load_grammars
from ..tokenizer.grammar_check import GrammarChecker

MEMORY_BYTES = 4 << 30
"""Address space of one process, as of one that encodes texts; the library's limits keep what it uses far below."""
GRACE_S = 1.0
"""Processor time beyond the limit at which the kernel ends the process: at the limit itself, it refuses the grammar."""
LENGTH = struct.Struct("<Q")


@attrs.frozen
class WorkerSettings:
    """How grammars are checked."""

    eos_token_ids: tuple[int, ...]
    max_bytes: int
    max_seconds: float
    """Of processor time for one grammar."""


def main() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    link, read = become_child(MEMORY_BYTES)
    try:
        tokenizer_json = _read_frame(read)
        settings = WorkerSettings(**json.loads(_read_frame(read)))
        library = load_grammars(tokenizer_json, tuple(settings.eos_token_ids))
        del tokenizer_json
        checker = GrammarChecker(library, settings.max_bytes, settings.max_seconds)
        link.sendall(frame_of({}))
        while True:
            kind, source, param = json.loads(_read_frame(read))
            signal.setitimer(signal.ITIMER_PROF, settings.max_seconds + GRACE_S)
            answer = frame_of(_check(checker, GrammarSpec(GrammarKind(kind), source, param)))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            link.sendall(answer)
            del source, answer
    except (EOFError, OSError):
        pass  # the parent is gone


def frame_of(value: Any) -> bytes:
    """Return a value as JSON, after its length."""
    data = json.dumps(value).encode()
    return LENGTH.pack(len(data)) + data


def _read_frame(read: Read) -> bytes:
    return read(LENGTH.unpack(read(LENGTH.size))[0])


def _check(checker: GrammarChecker, spec: GrammarSpec) -> dict[str, str]:
    try:
        result = checker.check(spec)
    except MemoryError:
        return {"error": f"Invalid value for `{spec.param}`: it takes too much memory to compile."}
    return {"text": result} if isinstance(result, str) else {"error": result.message}


if __name__ == "__main__":
    main()
