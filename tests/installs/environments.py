"""Clean environments to install quipu into: which Python, which pip, what, and how old the dependencies are.

Used by `__main__.py`. A plain pip sees no configuration of this machine, only PyPI. Nothing here uses the environment
that runs it, but for the packages that build the wheel.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import attrs

ROOT = Path(__file__).resolve().parents[2]
PINNED, NEWEST, OLDEST = "pinned", "newest", "oldest"
NO_COMPILER = "no-such-compiler"
CHECKOUT, WHEEL, UVX, PIPX = "checkout", "wheel", "uvx", "pipx run"
TORCH = re.search(r"(?m)^TORCH := (\S+)$", (ROOT / "Makefile").read_text("utf-8"))
TOOLS = ROOT / ".venv-release" / "bin"
"""Where `make test-installs` has put uv and pipx."""
MINUTES = 60.0
INSTALL_S = 20 * MINUTES


class CannotInstall(Exception):
    """An installation failed; the message has the end of what it printed."""


@attrs.frozen
class Environment:
    """One way to install quipu."""

    python: str
    is_plain: bool
    """Whether pip is used without this machine's configuration."""
    what: str
    versions: str

    @property
    def name(self) -> str:
        return f"Python {self.python}, {'plain pip' if self.is_plain else 'pip as here'}, {self.what}, {self.versions}"


ENVIRONMENTS = (
    Environment("3.11", False, CHECKOUT, PINNED),
    Environment("3.11", True, CHECKOUT, PINNED),
    Environment("3.11", False, WHEEL, NEWEST),
    Environment("3.11", True, WHEEL, NEWEST),
    Environment("3.12", True, CHECKOUT, PINNED),
    Environment("3.12", True, WHEEL, NEWEST),
    Environment("3.13", True, WHEEL, NEWEST),
    Environment("3.13", True, CHECKOUT, PINNED),
    Environment("3.11", True, WHEEL, OLDEST),
    Environment("3.11", True, UVX, NEWEST),
    Environment("3.11", True, PIPX, NEWEST),
)


def dependencies() -> list[str]:
    """Return the requirements of the package, without its extras."""
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"])


def oldest(requirements: Iterable[str]) -> Iterator[str]:
    """Yield a constraint for each requirement that pins it to the lower bound it states."""
    for requirement in requirements:
        found = re.match(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?[>=]=([0-9.]+)", requirement)
        if found is None:
            raise ValueError(f"no lower bound in {requirement!r}")
        yield f"{found[1]}=={found[2]}"


def without_upper_bound(requirements: Iterable[str]) -> list[str]:
    """Return the requirements without an upper bound; there should be none."""
    return [each for each in requirements if "<" not in each and "==" not in each]


def find_python(version: str) -> Path | None:
    """Return an interpreter of this version that starts."""
    named = shutil.which(f"python{version}")
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for path in [*([Path(named)] if named else []), *installed]:
        done = subprocess.run([path, "-c", "import venv"], capture_output=True, check=False)
        if done.returncode == 0:
            return path
    return None


def pip_environment(*, is_plain: bool) -> dict[str, str]:
    """Return the variables that pip is run with."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if is_plain:
        variables = {name: value for name, value in variables.items() if not name.startswith("PIP_")}
        variables["PIP_CONFIG_FILE"] = os.devnull
        if certificates := os.environ.get("PIP_CERT"):
            variables["PIP_CERT"] = certificates  # how the network is reached, not what is found there
    return variables


@attrs.frozen
class Index:
    """A stand-in for PyTorch's index of CPU builds, which is served while an environment is tried."""

    folder: Path
    url: str


@contextmanager
def serving_index(folder: Path) -> Iterator[Index]:
    """Serve the folders in `folder` as an index of packages."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Index(folder, f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


def install(environment: Environment, python: Path, wheel: Path, folder: Path, index: Index) -> tuple[Path, str]:
    """Install into `folder`; return the command `quipu` and what was printed on the way. Raises CannotInstall.

    A wheel's command runs as on a machine without a compiler, with nothing compiled before.
    """
    variables = pip_environment(is_plain=environment.is_plain)
    if environment.what == CHECKOUT:
        _run(["git", "clone", "--quiet", str(ROOT), str(folder)], variables, folder.parent)
        printed = _run(["make", "install", f"PYTHON={python}"], variables, folder)
        return folder / ".venv" / "bin" / "quipu", printed
    folder.mkdir()
    if environment.what in (UVX, PIPX):
        _fill_index(environment, python, index.folder)
        command, more = with_tool(environment.what, python, wheel, folder, index.url)
        printed = ""
        variables |= more
    else:
        command = [str(folder / "venv" / "bin" / "quipu")]
        printed = _install_wheel(environment, python, wheel, folder, variables)
    quipu = folder / "quipu"
    variables |= {"CXX": NO_COMPILER, "XDG_CACHE_HOME": str(folder / "cache")}
    words = ["exec", "env", *(f"{name}={value}" for name, value in variables.items()), *command]
    quipu.write_text(f'#!/bin/sh\n{shlex.join(words)} "$@"\n')
    quipu.chmod(0o755)
    _run([str(quipu), "--version"], variables, folder)
    said = _run(["sh", "-c", f"{quipu} doctor || true"], variables, folder)
    for part in ("part of the package", *(["+cpu"] if environment.what in (UVX, PIPX) else [])):
        if part not in said:
            raise CannotInstall(f"`quipu doctor` does not say {part!r}: {said}")
    return quipu, printed


def _install_wheel(environment: Environment, python: Path, wheel: Path, folder: Path, variables: dict[str, str]) -> str:
    """Install a wheel with pip into `folder`/venv; return what was printed."""
    assert TORCH is not None
    _run([str(python), "-m", "venv", "venv"], variables, folder)
    own = str(folder / "venv" / "bin" / "python")
    constraints: list[str] = []
    if environment.versions == OLDEST:
        path = folder / "oldest.txt"
        path.write_text("\n".join(oldest(dependencies())) + "\n")
        constraints = ["-c", str(path)]
        printed = ""
    else:
        printed = _run([own, str(ROOT / "scripts" / "install_torch.py"), TORCH[1]], variables, folder)
    return printed + _run([own, "-m", "pip", "install", "--quiet", *constraints, str(wheel)], variables, folder)


def with_tool(tool: str, python: Path, wheel: Path, folder: Path, url: str) -> tuple[list[str], dict[str, str]]:
    """Return the command with which uvx or pipx runs quipu, with its variables; the first time it installs."""
    if tool == UVX:
        command = [str(TOOLS / "uvx"), "--python", str(python), "--index", url, "--from", str(wheel), "quipu"]
    else:
        command = [str(TOOLS / "pipx"), "run", "--python", str(python), f"--pip-args=--extra-index-url {url}"]
        command += ["--spec", str(wheel), "quipu"]
    return command, {"HOME": str(folder), "UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(folder / "uv")}


def _fill_index(environment: Environment, python: Path, folder: Path) -> None:
    """Put torch's CPU build, which pip finds as it is set up here, into the stand-in. Raises CannotInstall."""
    assert TORCH is not None
    (folder / "torch").mkdir()
    command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder / "torch")]
    try:
        _run([*command, f"torch=={TORCH[1]}+cpu"], dict(os.environ), folder)
    except CannotInstall as error:
        raise CannotInstall(f"not run: no CPU build of torch for Python {environment.python}: {error}") from None


def _run(command: list[str], variables: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=INSTALL_S,
    )
    if done.returncode:
        raise CannotInstall(f"{' '.join(command[:4])} …: {done.stdout[-1500:]}")
    return done.stdout
