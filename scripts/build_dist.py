"""Build the sdist, from it a wheel for this machine, and check both: `python -m scripts.build_dist` (`make dist`).

Run with the Python of `.venv-release`, which has the tools of `release.txt`. The wheel's platform is the oldest glibc
and libstdc++ that it runs with, as auditwheel finds by its symbols: that of the machine it is built on, or a little
older. Published wheels are built by `make wheels` instead, in containers with an old glibc.

What must always hold: the wheel is built from the sdist, so neither lacks a source; it does not bring a libgomp, since
the kernels share torch's.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.check_wheel import check

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent


class CannotBuild(Exception):
    """A step failed; the message has the end of what it printed."""


def run(*command: str, environment: dict[str, str] | None = None) -> str:
    """Run a program of the tools' environment, or another, in the repository's root; return its output."""
    path = os.pathsep.join((str(TOOLS), os.environ["PATH"]))
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": path, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CannotBuild(f"{' '.join(command[:4])}: {done.stdout[-2000:]}")
    return done.stdout


def repair(wheel: Path, folder: Path) -> Path:
    """Write the wheel under the name of the platform that it needs; return its path."""
    with tempfile.TemporaryDirectory() as made:
        run("auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", made, str(wheel))
        (repaired,) = Path(made).glob("*.whl")
        return repaired.replace(folder / repaired.name)


def check_all(sdist: Path, wheel: Path) -> None:
    """Raise CannotBuild if the wheel or the metadata is not fit to be published."""
    if wrong := check(wheel):
        raise CannotBuild(f"{wheel.name}: {'; '.join(wrong)}")
    run("twine", "check", "--strict", str(sdist), str(wheel))
    run("abi3audit", "--strict", "--assume-minimum-abi3", "3.11", str(wheel))
    run("check-wheel-contents", str(wheel))


def build(folder: Path) -> tuple[Path, Path]:
    """Build and check; return the paths of sdist and wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    commit_time = run("git", "log", "-1", "--format=%ct").strip()
    with tempfile.TemporaryDirectory() as made:
        command = [sys.executable, "-m", "build", "--outdir", made]
        run(*command, environment={"SOURCE_DATE_EPOCH": commit_time})
        (built,) = Path(made).glob("*.whl")
        (packed,) = Path(made).glob("*.tar.gz")
        wheel = repair(built, folder)
        sdist = packed.replace(folder / packed.name)
    check_all(sdist, wheel)
    return sdist, wheel


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.build_dist", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for both (default: dist)")
    try:
        sdist, wheel = build(parser.parse_args().out.resolve())
    except CannotBuild as error:
        print(error, file=sys.stderr)
        return 1
    for path in (sdist, wheel):
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    print(f"built with {' '.join(platform.libc_ver())}; `make wheels` builds for older systems, in containers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
