"""Make a release, all but publishing it: `make release VERSION=0.2.0` (docs/internals/releasing.md).

In a temporary clone: sets the version, turns `changes/` into a section of CHANGELOG.md, commits, builds and checks the
sdist and a wheel, and tags. Only then commit, tag and files come here, so a release that fails leaves nothing behind.
With `--dry-run` they never do.

What must always hold: nothing is pushed or uploaded. The workflow that a pushed tag starts publishes, after a person
has approved it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from packaging.version import InvalidVersion, Version

from scripts.changelog import section, take_in_unreleased

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent
BRANCH = "main"
VERSIONED = {
    "pyproject.toml": r'(?m)^version = "([^"]+)"$',
    "src/quipu/__init__.py": r'(?m)^__version__ = "([^"]+)"$',
    "deploy/helm/quipu/Chart.yaml": r"(?m)^(?:version|appVersion): (\S+)$",
}
"""The files that have the version, and the lines in which."""


class CannotRelease(Exception):
    """Something is not as a release needs it; the message says what, and what to do."""


def run(*command: str, folder: Path) -> str:
    """Run a program, with the tools of this environment first; return its output."""
    path = os.pathsep.join((str(TOOLS), os.environ["PATH"]))
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotRelease(f"{' '.join(command[:4])}: {(done.stdout + done.stderr)[-2000:].strip()}")
    return done.stdout.strip()


def check_version(version: str, tags: list[str]) -> None:
    """Raise CannotRelease unless the version is newer than every tag of a release."""
    try:
        asked = Version(version)
    except InvalidVersion:
        asked = None
    if asked is None or str(asked) != version or len(asked.release) != 3 or asked.local or asked.is_devrelease:
        raise CannotRelease(f"invalid version {version!r} (for example 0.2.0 or 1.0.0rc1)")
    for tag in tags:
        if re.match(r"v\d", tag) and Version(tag[1:]) >= asked:
            raise CannotRelease(f"{tag} has been released; {version} is not newer")


def check_repository(root: Path) -> None:
    """Raise CannotRelease unless this is a clean `main` that is the same as the remote's."""
    if changed := run("git", "status", "--porcelain", folder=root):
        raise CannotRelease(f"commit or remove these first:\n{changed}")
    branch = run("git", "branch", "--show-current", folder=root)
    if branch != BRANCH:
        raise CannotRelease(f"this is {branch or 'no branch'}; releases are made from {BRANCH}")
    heads = run("git", "for-each-ref", "--format=%(objectname)", f"refs/remotes/origin/{BRANCH}", folder=root)
    if heads and heads != run("git", "rev-parse", "HEAD", folder=root):
        raise CannotRelease(f"this is not origin/{BRANCH}: pull or push first")
    if not tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"].get("urls"):
        raise CannotRelease("pyproject.toml has no [project.urls]: name Source, Documentation, Changelog and Issues")


def set_version(folder: Path, version: str) -> None:
    """Write the version into every file that has it."""
    for name, pattern in VERSIONED.items():
        path = folder / name
        text, count = re.subn(pattern, lambda found: found[0].replace(found[1], version), path.read_text("utf-8"))
        if not count:
            raise CannotRelease(f"no version in {name}")
        path.write_text(text, "utf-8")


def write_notes(folder: Path, version: str) -> None:
    """Move `changes/` into a section of CHANGELOG.md."""
    date = datetime.now(UTC).date().isoformat()
    run("towncrier", "build", "--yes", "--version", version, "--date", date, folder=folder)


def build(folder: Path, out: Path) -> None:
    """Build and check the sdist and a wheel, and try the wheel in a clean environment."""
    run(sys.executable, "-m", "scripts.build_dist", "--out", str(out), folder=folder)
    run(sys.executable, "scripts/try_wheel.py", *map(str, out.glob("*.whl")), folder=folder)


def prepare(
    clone: Path,
    out: Path,
    version: str,
    *,
    write_notes: Callable[[Path, str], None] = write_notes,
    build: Callable[[Path, Path], None] = build,
) -> str:
    """Make the release in a clone: commit, build and tag. Return what the changelog says of it."""
    check_version(version, run("git", "tag", "--list", folder=clone).split())
    set_version(clone, version)
    write_notes(clone, version)
    changelog = clone / "CHANGELOG.md"
    try:
        changelog.write_text(take_in_unreleased(changelog.read_text("utf-8"), version), "utf-8")
    except ValueError as error:
        raise CannotRelease(str(error)) from None
    run("git", "add", "--all", folder=clone)
    run("git", "commit", "--quiet", "--message", f"Release {version}", folder=clone)
    build(clone, out)
    run("git", "tag", "--annotate", f"v{version}", "--message", f"quipu {version}", folder=clone)
    return section(changelog.read_text("utf-8"), version)


def clone_of(root: Path, folder: Path) -> Path:
    """Clone the repository with its tags, and whoever commits in it."""
    clone = folder / "quipu"
    run("git", "clone", "--quiet", str(root), str(clone), folder=folder)
    for name in ("user.name", "user.email"):
        run("git", "config", name, run("git", "config", name, folder=root), folder=clone)
    return clone


def take_over(root: Path, clone: Path, version: str, out: Path) -> None:
    """Bring commit, tag and files from the clone."""
    run("git", "pull", "--quiet", "--ff-only", "--tags", str(clone), BRANCH, folder=root)
    for path in out.iterdir():
        (root / "dist").mkdir(exist_ok=True)
        shutil.copy(path, root / "dist")
    print(f"""
{BRANCH} and v{version} are made here, and the files are in dist/. What is left to do:

  1. look at the commit:      git show v{version}
  2. try it in more places:   make test-installs ARGS="--wheel dist/{next(out.glob("*.whl")).name}"
  3. push both:               git push --atomic origin {BRANCH} v{version}
  4. approve the environment "pypi" in the run of release.yml that the tag has started; it builds the wheels for x86-64
     and arm64 again, in containers, checks them, and publishes""")


def main(argv: list[str] | None = None) -> int:
    """Release, or say what keeps it."""
    parser = argparse.ArgumentParser(prog="python -m scripts.release", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", help="the version to release, such as 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="do everything in a clone, and leave it at that")
    arguments = parser.parse_args(argv)
    try:
        kept = ""
        try:
            check_repository(ROOT)
        except CannotRelease as error:
            if not arguments.dry_run:
                raise
            kept = f"a release would stop here: {error}\n"
        with tempfile.TemporaryDirectory() as folder:
            clone, out = clone_of(ROOT, Path(folder)), Path(folder, "dist")
            print(prepare(clone, out, arguments.version))
            print(run("git", "show", "--stat", "--format=%s", "HEAD", folder=clone))
            print("\n".join(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB" for path in sorted(out.iterdir())))
            if arguments.dry_run:
                print(f"{kept}nothing is changed here: this was a dry run")
            else:
                take_over(ROOT, clone, arguments.version, out)
    except CannotRelease as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
