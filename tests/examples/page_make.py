"""What make would run for the commands of the documents: it is asked with `-n`, and nothing is run.

Modules of the repository that it would start must exist, and accept the flags that a page gives them with `ARGS`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from .page_blocks import ROOT, commands_of
from .page_parsing import NotAsDocumentedError, parse_module, spelled_out

_MAKE = re.compile(r"(?:[A-Z_]+=\S+ )*make [a-z]")
_OURS = re.compile(r"(?:bench|scripts|tests|quipu)\b")
_PATH = re.compile(r"(?:bench|scripts|tests)/[\w/.-]+")


def make_calls_of(pages: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the arguments of each call of make on the pages once, spelled out."""
    calls = set()
    for page in pages:
        for command in commands_of(page):
            if _MAKE.match(command):
                for line in spelled_out(command):
                    words = shlex.split(line)
                    calls.add(tuple(words[words.index("make") + 1 :]))
    return sorted(calls)


def would_run(argv: Sequence[str]) -> list[list[str]]:
    """Return the words of each line that make would run. Raises NotAsDocumentedError if there is no such target."""
    text = (ROOT / "Makefile").read_text()
    for word in argv:
        name, _, value = word.partition("=")
        # a folder of this name would do for make
        pattern = rf"^{name} \??:?=|\$\({name}\)" if value else rf"^{re.escape(word)}:"
        if not re.search(pattern, text, re.MULTILINE):
            raise NotAsDocumentedError(f"the Makefile has no {word}")
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", *argv],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},  # without the flags of a make that runs this
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NotAsDocumentedError(done.stderr.strip())
    lines = re.sub(r"\\\n\s*", " ", done.stdout).splitlines()
    return [_words_of(line) for line in lines]


def _words_of(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a script of several lines
        return []


def quipu_in(commands: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    """Yield the arguments of each `quipu` that would be started."""
    for words in commands:
        for at, word in enumerate(words):
            if word.endswith("/bin/quipu"):
                yield list(words[at + 1 :])


def check_repository_has(argv: Sequence[str], commands: Iterable[Sequence[str]]) -> None:
    """Check modules and files that would be started, and flags that are given to one. Raises NotAsDocumentedError."""
    given = [flag for word in argv if "=" in word for flag in shlex.split(word.partition("=")[2])]
    for words in commands:
        for word in words:
            if _PATH.fullmatch(word) and not (ROOT / word).exists():
                raise NotAsDocumentedError(f"there is no {word}")
        for at, word in enumerate(words[:-1]):
            if word == "-m" and _OURS.match(words[at + 1]):
                _check_module([words[at + 1].rstrip(");"), *words[at + 2 :]], given)


def _check_module(words: Sequence[str], given: Sequence[str]) -> None:
    try:
        found = importlib.util.find_spec(words[0])
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise NotAsDocumentedError(f"there is no module {words[0]}")
    if given and all(flag in words for flag in given):
        parse_module(words)
