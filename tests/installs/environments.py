"""Clean environments to install quipu into: which Python, which pip, what, and how old the dependencies are.

Used by `__main__.py`. A plain pip sees no configuration of this machine, only PyPI. Nothing here uses the environment
that runs it, but for the packages that build the wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
PINNED, NEWEST, OLDEST = "pinned", "newest", "oldest"
CHECKOUT, WHEEL = "checkout", "wheel"
TORCH = re.search(r"(?m)^TORCH := (\S+)$", (ROOT / "Makefile").read_text("utf-8"))
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


def install(environment: Environment, python: Path, wheel: Path, folder: Path) -> tuple[Path, str]:
    """Install into `folder`; return the command `quipu` and what was printed on the way. Raises CannotInstall."""
    variables = pip_environment(is_plain=environment.is_plain)
    if environment.what == CHECKOUT:
        _run(["git", "clone", "--quiet", str(ROOT), str(folder)], variables, folder.parent)
        printed = _run(["make", "install", f"PYTHON={python}"], variables, folder)
        return folder / ".venv" / "bin" / "quipu", printed
    assert TORCH is not None
    _run([str(python), "-m", "venv", str(folder)], variables, folder.parent)
    own = str(folder / "bin" / "python")
    constraints: list[str] = []
    if environment.versions == OLDEST:
        path = folder / "oldest.txt"
        path.write_text("\n".join(oldest(dependencies())) + "\n")
        constraints = ["-c", str(path)]
        printed = ""
    else:
        printed = _run([own, str(ROOT / "scripts" / "install_torch.py"), TORCH[1]], variables, folder)
    printed += _run([own, "-m", "pip", "install", "--quiet", *constraints, str(wheel)], variables, folder)
    return folder / "bin" / "quipu", printed


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
