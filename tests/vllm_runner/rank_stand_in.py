"""The process of a rank that computes nothing: it says what it has inherited, and ends as it is told."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import attrs

from quipu.kernels.vllm_runner.rank_messages import RankPlace
from quipu.kernels.vllm_runner.rank_process import bind_to


@attrs.frozen
class Describe:
    """Say who you are."""


@attrs.frozen
class End:
    """End with this exit code, after these words."""

    code: int
    words: str


@attrs.frozen
class Description:
    place: RankPlace
    descriptors: list[str]
    """What each of its descriptors refers to."""


def main(argv: list[str]) -> NoReturn:
    parent, passes, _, last_words = map(int, argv)
    bind_to(parent)
    link = Connection(passes)
    place, _ = link.recv()
    while True:
        asked = link.recv()
        if isinstance(asked, End):
            os.pwrite(last_words, asked.words.encode(), 0)
            os._exit(asked.code)
        found = []
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # that of the list itself is closed by now
                found.append(str(path.readlink()))
        link.send(Description(place, found))


if __name__ == "__main__":
    from tests.vllm_runner import rank_stand_in

    rank_stand_in.main(sys.argv[1:])  # not this module's own: messages are found by the name of their module
