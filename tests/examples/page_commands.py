"""Commands of the documents that are run with less to do than they say, and servers that are resolved and not started.

Flags that follow override those of the page: an audit of few short prompts, a benchmark of three requests, one reading
of `quipu top`. What cannot be had here is replaced: models of the hub by the demo model, said to have a long context,
adapters by its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import httpx2
import trio

from quipu.actors.shared.checkpoint import CheckpointInfo, read_info
from quipu.web.cli import run_batch_command, serve, settings, speculative_flags
from quipu.web.cli.serve_command import make_parser
from quipu.web.telemetry import logs
from tests.authorities import Authority

LIGHTER: dict[tuple[str, ...], tuple[str, ...]] = {
    ("audit",): ("--api", "completions", "--prompt-tokens", "40", "--budget", "1500", "--quiet"),
    ("top",): ("--once", "--interval", "0.1"),
    ("bench", "serve"): ("--num-prompts", "3", "--disable-tqdm"),
    ("run-batch",): (),
}
"""Commands that are sent to the server under test, with the flags that make them short."""
ELSEWHERE = re.compile(r"https?://(?!127\.0\.0\.1)")
_STAND_INS = (
    (re.compile(r"^(?:MODEL|[A-Z]\w+/[\w.:-]+|owner/.*|.*\.gguf|/path/to/checkpoint)$"), "demo"),
    (re.compile(r"^(\w+)=adapters/\w+$"), r"\1=demo-pirate"),
    (re.compile(r"^adapters$"), "."),
    (re.compile(r"^/etc/quipu/"), ""),
    (re.compile(r"^/var/cache/"), ""),
)
"""What is not on the machine that runs the tests, and what takes its place."""


def lightened(argv: Sequence[str], url: str) -> list[str] | None:
    """Return a command that can be run at `url`; None if it is about another server, or cannot be run here."""
    for command, flags in LIGHTER.items():
        if tuple(argv[: len(command)]) == command:
            if any(map(ELSEWHERE.match, argv)) or "--compare" in argv:
                return None
            place = {"top": [url], "bench": ["--base-url", url]}.get(command[0], [])
            return [*command, *(word for word in argv[len(command) :] if word != url or not place), *place, *flags]
    return None


@contextmanager
def batches_on(url: str) -> Iterator[None]:
    """Have `quipu run-batch` give its file to the server at `url`, instead of one that it starts."""

    @contextmanager
    def at(flags: Sequence[str], _: Path) -> Iterator[httpx2.Client]:
        make_parser().parse_args(flags)
        with httpx2.Client(base_url=url, trust_env=False) as http:
            yield http

    with mock.patch.object(run_batch_command, "_serving", at):
        yield


@attrs.frozen
class _Told:
    """Takes what a server says to its user."""

    say: Callable[[str], None]

    def drain(self) -> None:
        """Nothing is kept."""


def resolve_server(argv: Sequence[str], folder: Path, say: Callable[[str], None]) -> int:
    """Do all that `quipu serve` does before it starts; return its exit code."""
    words = [_stand_in(word) for word in argv]
    if any(word.startswith("--link-tls") for word in words) and not (folder / "ca.pem").exists():
        _write_certificates(folder)
    arguments = make_parser().parse_args(words)
    with ExitStack() as stack:
        for module, name in ((trio, "run"), (serve, "raise_file_limit"), (sys, "setswitchinterval")):
            stack.enter_context(mock.patch.object(module, name, lambda *_: None))
        stack.enter_context(mock.patch.object(logs, "configure", lambda _: _Told(say)))
        if "demo" in words and "demo" not in argv:
            for module in (settings, speculative_flags):
                stack.enter_context(mock.patch.object(module, "read_info", _long_context))
        return serve.run_serve(arguments)


def _long_context(path: Path, **options: Any) -> CheckpointInfo:
    return attrs.evolve(read_info(path, **options), max_model_len=1 << 17)


def _stand_in(word: str) -> str:
    for pattern, instead in _STAND_INS:
        word = pattern.sub(instead, word)
    return word


def _write_certificates(folder: Path) -> None:
    files = Authority(folder / "authority").files("127.0.0.1")
    for name, path in (("node.pem", files.cert), ("node.key", files.key), ("ca.pem", files.ca)):
        (folder / name).write_bytes(Path(path).read_bytes())
