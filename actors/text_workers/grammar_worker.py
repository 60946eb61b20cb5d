"""The program of the processes that check grammars: it loads the tokenizer, and forks a process whenever one is needed.

`grammar_process.py` has them forked, talks to each over a socket, and has them killed. The grammar library cannot be
interrupted and takes all of a processor: here both are limited.

    load      the `tokenizer.json`; a `WorkerSettings` as JSON
    greeting  empty
    job       kind, source and field of a grammar, and the processor time that it may take, as a JSON list
    answer    a JSON object: the grammar's `text` or an `error`

What must always hold: a process ends when its parent does, and when a grammar takes too much processor time; it never
uses more memory than `MEMORY_BYTES`.
"""

from __future__ import annotations

import json
import signal
import socket
from functools import partial

import attrs

from ..fleet.forks.fork_program import become_server, frame_of, read_frame, serve_forks
from ..grammars.grammar_check import GrammarChecker
from ..grammars.grammar_library import load_grammars
from ..messages.grammar import GrammarKind, GrammarSpec

MEMORY_BYTES = 4 << 30
"""Address space of one process; the library's limits keep its memory far below."""


@attrs.frozen
class WorkerSettings:
    eos_token_ids: tuple[int, ...]
    max_bytes: int
    max_seconds: float
    """Of processor time for one grammar."""


def main() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    link = become_server(MEMORY_BYTES)
    try:
        with link.makefile("rb") as stream:
            tokenizer_json, settings = read_frame(stream), WorkerSettings(**json.loads(read_frame(stream)))
        library = load_grammars(tokenizer_json, tuple(settings.eos_token_ids))
        del tokenizer_json
        checker = GrammarChecker(library, settings.max_bytes, settings.max_seconds)
        link.sendall(frame_of(b""))
        serve_forks(link, partial(_check_each, checker))
    except (EOFError, OSError):
        pass  # the parent is gone


def _check_each(checker: GrammarChecker, descriptors: list[int]) -> None:
    link = socket.socket(fileno=descriptors[0])
    with link.makefile("rb") as stream:
        while True:
            kind, source, param, limit_s = json.loads(read_frame(stream))
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            answer = json.dumps(_check(checker, GrammarSpec(GrammarKind(kind), source, param))).encode()
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            link.sendall(frame_of(answer))
            del source, answer


def _check(checker: GrammarChecker, spec: GrammarSpec) -> dict[str, str]:
    try:
        result = checker.check(spec)
    except MemoryError:
        return {"error": f"Invalid value for `{spec.param}`: it takes too much memory to compile."}
    return {"text": result} if isinstance(result, str) else {"error": result.message}


if __name__ == "__main__":
    main()
