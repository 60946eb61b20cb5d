"""The program of the processes that follow grammars: it loads the tokenizer, and forks one process for each grammar.

`grammar_follower.py` has it forked and talks to each process over a socket. A grammar library in C or Rust cannot be
interrupted; here the operating system kills a process that takes too much CPU time, which affects its grammar alone.

    load     the `tokenizer.json`; the tokens that end an output, as a JSON list
        greeting the tokens that a grammar may end with, as a mask; empty if the library cannot map its tokens to bytes
    grammar  seconds (8 bytes) that compiling may take, and the text. The answer is empty, or the reason for a failure
    ask      msgpack: the seconds for one mask, sequences to forget, and a `RowAsk` for each other sequence.
             The answer, msgpack: an `Answer`. Each `RowAsk` has a place, followed by one for each of its drafts. The
             shared memory has a status byte per place, set for a `RowAsk`'s first one, which shows what was done if the
             process is killed before it answers, followed by the masks

What must always hold: a process ends when the engine does, when it takes too much CPU time for one mask, and when it
needs more memory than `MEMORY_BYTES`.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import struct
from contextlib import suppress
from functools import partial

import msgspec

from ...fleet.forks.fork_program import become_server, frame_of, read_frame, serve_forks
from ...grammars.grammar_library import GrammarError, GrammarLibrary, load_grammars
from .mask_rows import RowAsk, RowMasks

MEMORY_BYTES = 4 << 30
"""Address space of one process; the library's own limits keep its use far below."""
SECONDS = struct.Struct("<d")
PENDING, HAS_MASK, HAS_FAILED = range(3)
"""Values of a place's status byte."""


class Ask(msgspec.Struct, array_like=True):
    """A request for the masks of some sequences."""

    limit_s: float
    """CPU time for each mask, and for each slice of the tokens to follow."""
    gone: list[int]
    rows: list[RowAsk]


class Answer(msgspec.Struct, array_like=True):
    """What the shared memory does not hold, by place."""

    reasons: dict[int, str]
    """Why masks are missing."""
    forced: dict[int, list[int]]
    """Tokens that have to come next."""


def main() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with suppress(OSError):  # otherwise a woken process would take the CPU of the thread that wakes it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    link = become_server(MEMORY_BYTES)
    try:
        with link.makefile("rb") as stream:
            tokenizer_json, eos_token_ids = read_frame(stream), tuple(json.loads(read_frame(stream)))
        library = load_grammars(tokenizer_json, eos_token_ids)
        del tokenizer_json
        link.sendall(frame_of(b"" if library is None else library.end_mask.tobytes()))
        if library is not None:
            serve_forks(link, partial(follow, library, can_end=bool(eos_token_ids)))
    except (EOFError, OSError):
        pass  # the engine is gone


def follow(library: GrammarLibrary, descriptors: list[int], *, can_end: bool) -> None:
    """Follow one grammar, until the engine closes its socket or a limit is exceeded."""
    link, masks = socket.socket(fileno=descriptors[0]), mmap.mmap(descriptors[1], 0)
    limit_s = 0.0

    def arm() -> None:
        signal.setitimer(signal.ITIMER_PROF, limit_s)

    with link.makefile("rb") as stream:
        data = read_frame(stream)
        (limit_s,) = SECONDS.unpack_from(data)
        arm()
        try:
            rows = RowMasks(library, data[SECONDS.size :].decode("utf-8", "surrogatepass"), can_end=can_end, arm=arm)
        except (GrammarError, ValueError) as error:
            link.sendall(frame_of(str(error).encode("utf-8", "replace")))
            return
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        link.sendall(frame_of(b""))
        del data
        size = 4 * library.num_words
        first = len(masks) // (1 + size)  # the masks follow one status byte per place; as many places as fit
        while True:
            ask = msgspec.msgpack.decode(read_frame(stream), type=Ask)
            limit_s = ask.limit_s
            for row in ask.gone:
                rows.forget(row)
            answer = Answer({}, {})
            place = 0
            for row_ask in ask.rows:
                try:
                    found = rows.masks(row_ask)
                    answer.forced.update({place + num: token_ids for num, token_ids in found.forced.items()})
                    for at, words_W in enumerate(found.words, place):
                        start = first + at * size
                        masks[start : start + size] = words_W.tobytes()
                    masks[place] = HAS_MASK
                except GrammarError as error:
                    answer.reasons[place] = str(error).encode("utf-8", "replace").decode()
                    masks[place] = HAS_FAILED
                place += 1 + len(row_ask.drafts)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            link.sendall(frame_of(msgspec.msgpack.encode(answer)))


if __name__ == "__main__":
    main()
