"""Check that wheels are whole, which building one is not: `python scripts/check_wheel.py WHEEL…`.

A build without a compiler succeeds and leaves the kernels out, since a user without one is better off with a slow quipu
than with none (see setup.py). A published wheel has them all. Nothing but the standard library is needed.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Collection, Iterator
from email import message_from_string
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # also without an installed quipu

from quipu.kernels.cpu.instruction_sets import INSTRUCTION_SETS

NAME = re.compile(r"quipu_llm-(?P<version>[^-]+)-cp311-abi3-(?P<platform>.+)_(?P<machine>x86_64|aarch64)\.whl")
NATIVE = "quipu/actors/shared/native/_native.abi3.so"
LIBRARIES = {f"quipu/kernels/cpu/lib/quipu-cpu-{each.name}.so" for each in INSTRUCTION_SETS}
MANYLINUX = re.compile(r"manylinux(2014|_2_\d+)")


def faults(name: str, members: Collection[str], metadata: str) -> Iterator[str]:
    """Yield what is wrong with a wheel of this file name, with these members and this METADATA."""
    found = NAME.fullmatch(name)
    if found is None:
        yield "its name is not that of a wheel for CPython 3.11 and later (cp311-abi3) on Linux"
        return
    if not all(map(MANYLINUX.match, found["platform"].split("."))):
        yield f"its platform is {found['platform']}, which an index does not take: repair it with auditwheel"
    expected = {NATIVE, *(LIBRARIES if found["machine"] == "x86_64" else ())}
    binaries = {member for member in members if re.search(r"\.so(\.|$)", member)}
    yield from (f"it lacks {member}" for member in sorted(expected - binaries))
    # such as a second OpenMP runtime beside torch's, which would compete with it for the cores
    yield from (f"it has {member}, which it should not" for member in sorted(binaries - expected))
    head = message_from_string(metadata)
    if head["Version"] != found["version"]:
        yield f"its metadata is of version {head['Version']}"
    for field in ("License-Expression", "License-File", "Requires-Python", "Description-Content-Type"):
        if not head[field]:
            yield f"its metadata has no {field}"


def check(path: Path) -> list[str]:
    """Return what is wrong with a wheel."""
    with zipfile.ZipFile(path) as wheel:
        members = wheel.namelist()
        (metadata,) = (member for member in members if member.endswith(".dist-info/METADATA"))
        return list(faults(path.name, members, wheel.read(metadata).decode()))


def main(argv: list[str]) -> int:
    """Check wheels, and print what is wrong with each."""
    bad = [f"{path}: {fault}" for path in argv for fault in check(Path(path))]
    print("\n".join(bad) or f"{len(argv)} wheels are whole")
    return min(len(bad), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
