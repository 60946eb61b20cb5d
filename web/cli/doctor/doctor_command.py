"""`quipu doctor`: what this machine can do, and what to fix before a server runs on it.

It starts nothing, asks no network, and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import attrs
import huggingface_hub.constants

from quipu.actors.config.declarations import Bounds
from quipu.kernels.cpu import compiling

from ..command_output import EXIT_FAILED, indented, print_result
from ..one_line_parser import OneLineParser
from ..setting_flags import integer
from .findings import Finding, Verdict, show
from .machine_checks import check_clock, check_gpu, check_kernels, check_memory, check_processor
from .place_checks import check_data_dir, check_files, check_hub_cache, check_packages, check_port, check_python


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code: 1 if there is a problem to fix."""
    arguments = make_parser().parse_args(argv)
    findings = find_all(arguments.host, arguments.port, arguments.data_dir)
    if arguments.json:
        text = indented([attrs.asdict(finding) for finding in findings]).decode().rstrip()
    else:
        text = "\n".join(show(findings))
    printed = print_result(text)
    return EXIT_FAILED if any(finding.verdict is Verdict.PROBLEM for finding in findings) else printed


def find_all(host: str, port: int, data_dir: Path) -> list[Finding]:
    """Run every check."""
    return [
        check_python(),
        check_packages(),
        check_processor(),
        check_kernels(Path(compiling.__file__).parent / "lib"),
        check_memory(),
        check_gpu(_torch_version()),
        check_clock(),
        check_port(host, port),
        check_data_dir(data_dir),
        check_files(),
        check_hub_cache(Path(huggingface_hub.constants.HF_HUB_CACHE)),
    ]


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "missing"


def make_parser() -> OneLineParser:
    parser = OneLineParser(prog="quipu doctor", description="Say what this machine can do, and what to fix.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address that a server is to listen on")
    add(
        "--port",
        type=integer(Bounds(minimum=0, maximum=65535)),
        default=8000,
        metavar="PORT",
        help="port that it is to listen on",
    )
    add("--data-dir", type=Path, default=Path("data"), metavar="FOLDER", help="folder for its data (default: data)")
    add("--json", action="store_true", help="print JSON")
    return parser
