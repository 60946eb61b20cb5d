"""`quipu quantize MODEL OUT`: write a checkpoint with quantized weights, in the format of compressed-tensors.

It loads torch, once its flags are read. `kernels/checkpoints/rewriting.py` does the work.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from quipu.actors.shared.checkpoint import CheckpointError, resolve
from quipu.actors.shared.terminals import can_redraw
from quipu.kernels.checkpoints.rewritten_formats import FORMATS

from .one_line_parser import OneLineParser
from .setting_flags import add_setting, parse_size


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    # read once, when torch is loaded: threads that wait for each other by spinning take ten times as long on a busy CPU
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    arguments = make_parser().parse_args(argv)
    from quipu.kernels.checkpoints.rewriting import rewrite
    from quipu.kernels.models.config import read_config
    from quipu.kernels.models.families import find_family
    from quipu.kernels.models.text_part import text_part

    out = Path(arguments.out)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores hangups, and they stay ignored
            signal.signal(number, _end)
    try:
        path = resolve(arguments.model)
        whole = read_config(path)
        find_family(whole).parse(whole, ignored=arguments.ignore_config_entries or ())
        config = text_part(whole)
        with _logged_progress():
            done = rewrite(path, config, out, arguments.format, max_shard_bytes=arguments.max_shard_size)
    except (CheckpointError, ValueError, OSError) as error:
        where = f"{out}: " if isinstance(error, OSError) and error.filename is None and error.strerror else ""
        print(f"quipu quantize: {where}{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"quipu quantize: interrupted, and {out} was not written", file=sys.stderr)
        return 130
    sizes = f"{_size(done.num_bytes)} instead of {_size(done.read_bytes)}"
    print(f"{done.num_quantized} matrices as {arguments.format} in {out}: {sizes}")
    if done.kept:
        kept = f"{len(done.kept)} matrices, such as {done.kept[0]}"
        print(f"not quantized, because groups do not divide their rows: {kept}")
    return 0


@contextmanager
def _logged_progress() -> Iterator[None]:
    """Where there is no terminal for a bar, print what the kernels log during the block."""
    logger = logging.getLogger("quipu.kernels")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("quipu quantize: %(message)s"))
    level = logger.level
    if not can_redraw(sys.stderr):
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _end(number: int, _frame: FrameType | None) -> None:
    """End the process as a signal does, but remove what is half written on the way."""
    raise SystemExit(128 + number)


def _size(num_bytes: int) -> str:
    unit, shift = ("GiB", 30) if num_bytes >= 1 << 30 else ("MiB", 20)
    return f"{num_bytes / (1 << shift):.2f} {unit}"


def make_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="quipu quantize", description="Write a checkpoint with quantized weights, which vLLM reads, too."
    )
    add = parser.add_argument
    model_help = "the checkpoint: a folder, a GGUF file, a hub id, or `demo` (see `quipu serve -h`)"
    add("model", metavar="MODEL", help=model_help)
    add("out", metavar="OUT", help="the folder to write, which must not exist")
    format_help = (
        "int8: one scale a row; w8a8: the same, for int8 activations; int4: one scale for each group of 32 or 128"
    )
    add("--format", choices=FORMATS, required=True, help=format_help)
    add(
        "--max-shard-size",
        type=parse_size,
        default=5 * 10**9,
        metavar="SIZE",
        help="maximum size of one file (default: 5GB)",
    )
    add_setting(add, "ignored_config_entries")
    return parser
