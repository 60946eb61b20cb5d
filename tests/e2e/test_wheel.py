"""The distribution: wheel and sdist build, and the wheel serves from a clean environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quipu.actors.shared.checkpoint import DEMO
from quipu.kernels.cpu.compiling import find_compiler
from quipu.kernels.cpu.instruction_sets import INSTRUCTION_SETS, CannotBuild, choose_instruction_set, processor_flags
from tests.e2e import servers

pytestmark = pytest.mark.timeout(300)  # the first build compiles the kernels of every instruction set

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("build", "data", "dist")
"""Folders at the top of a checkout that are not part of the sources."""


BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(hook: str, source: Path, folder: Path, **environment: str) -> str:
    """Call a hook of the build backend in a process of its own, as every frontend does; return its output."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", BUILD, hook, str(folder)],
        cwd=source,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        env={**os.environ, **environment},
    )
    return done.stdout


def copy_of_checkout(folder: Path) -> Path:
    """Copy the sources: the backend writes into them, and other workers may read or build the checkout meanwhile."""

    def generated(path: str, names: list[str]) -> set[str]:
        at_top = {name for name in names if name.startswith(".") or name in GENERATED} if Path(path) == ROOT else set()
        return at_top | {name for name in names if name == "__pycache__"}

    return shutil.copytree(ROOT, folder / "quipu", symlinks=True, ignore=generated)


def extract(distribution: Path, folder: Path) -> Path:
    """Extract the sdist; return the folder of its sources."""
    (sdist,) = distribution.glob("quipu_llm-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it; return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    build("build_sdist", copy_of_checkout(tmp_path_factory.mktemp("checkout")), folder)
    build("build_wheel", extract(folder, tmp_path_factory.mktemp("source")), folder)
    return folder


def test_contents(distribution: Path) -> None:
    """The wheel has every file of the product as it is, the demo model and all licences, no tests or benchmarks."""
    (wheel,) = distribution.glob("quipu_llm-*.whl")
    (sdist,) = distribution.glob("quipu_llm-*.tar.gz")
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    for folder in ("actors", "kernels", "web"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                name = f"quipu/{path.relative_to(ROOT)}"
                assert name in names
                assert path.suffix == ".so" or archive.read(name) == path.read_bytes(), name
    licences = {name.partition(".dist-info/licenses/")[2] for name in names} - {""}
    vendored = (ROOT / "web" / "ui" / "static" / "vendor").glob("*.LICENSE.txt")
    assert licences - {"web/"} >= {"LICENSE", *(str(path.relative_to(ROOT)) for path in vendored)}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"quipu", "quipu_llm"}
    assert {f"quipu/kernels/demo/checkpoint/{path.name}" for path in DEMO.iterdir()} <= names
    assert sum(info.file_size for info in zipfile.ZipFile(wheel).infolist() if "/demo/" in info.filename) <= 12_000_000
    with tarfile.open(sdist) as packed:
        assert any(name.endswith("/actors/wiring.py") for name in packed.getnames())


def test_wheel_has_kernels(distribution: Path) -> None:
    """The wheel has a library for each instruction set and is platform-specific."""
    try:
        find_compiler()
    except CannotBuild as error:
        pytest.skip(f"the wheel has no kernels: {error}")  # see test_wheel_without_compiler
    (wheel,) = distribution.glob("quipu_llm-*.whl")
    libraries = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if "/cpu/lib/" in name}
    assert libraries == {f"quipu-cpu-{each.name}.so" for each in INSTRUCTION_SETS}
    assert "linux" in wheel.name


def test_wheel_without_compiler(distribution: Path, tmp_path: Path) -> None:
    """The sdist builds without a compiler; the wheel then has the kernels' sources and no library."""
    source = extract(distribution, tmp_path)
    output = build("build_wheel", source, tmp_path, CXX="no-such-compiler", CC="no-such-compiler")
    assert "no CPU kernels for avx2: no C++ compiler found (looked for no-such-compiler)" in output
    (wheel,) = tmp_path.glob("quipu_llm-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert "quipu/kernels/cpu/csrc/linear/linear.cpp" in names


@pytest.fixture(autouse=True, scope="module")
def only_what_is_installed() -> Iterator[None]:
    """Keep a checkout on PYTHONPATH from being taken for the wheel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        yield


@pytest.fixture(scope="module")
def environment(distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a clean environment with the wheel.

    Dependencies come from the current environment, by path, so that nothing large is installed twice; this checkout is
    not on that path.
    """
    (wheel,) = distribution.glob("quipu_llm-*.whl")
    environment = tmp_path_factory.mktemp("installed") / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # .pth files in a folder that a .pth file names are not read, so the editable install is not visible
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--quiet"]
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True, timeout=60
    )
    return environment


def test_installed_kernels_load(environment: Path, tmp_path: Path) -> None:
    """The wheel's library is used if there is neither a compiler nor a library compiled before."""
    try:
        best = choose_instruction_set(processor_flags()).name
        find_compiler()
    except CannotBuild as error:
        pytest.skip(f"no kernels in the wheel or for this processor: {error}")
    code = "from quipu.kernels.cpu.build import load_kernels as k; found = k(); print(found.library._name)"
    done = subprocess.run(
        [str(environment / "bin" / "python"), "-P", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)},
        timeout=60,
    )
    library = Path(done.stdout.strip())
    assert library.is_relative_to(environment)
    assert library.name == f"quipu-cpu-{best}.so"


def test_installed_wheel_serves(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean environment with the wheel serves the demo model, which answers about a text, at first and from cache."""
    (packages,) = environment.glob("lib/python*/site-packages")
    where = [str(environment / "bin" / "python"), "-P", "-c", "import quipu.web.cli.cli as m; print(m.__file__)"]
    found = subprocess.run(where, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert Path(found).is_relative_to(packages)
    monkeypatch.setattr(servers, "NAMED", str(environment / "bin" / "quipu"))
    text = " ".join(("Otto keeps an owl.", "The river passed the old mill.", "Mira lives in Ashford.") * 5)
    messages = [
        {"role": "system", "content": f"Answer questions about this text.\n\n{text}"},
        {"role": "user", "content": "Where does Mira live?"},
    ]
    with servers.serving(tmp_path / "served", "demo") as server:
        assert bytes(environment) in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        first, second = (
            server.post("/v1/chat/completions", {"model": "demo", "temperature": 0, "messages": messages}).json()
            for _ in range(2)
        )
    assert first["choices"] == second["choices"]
    assert first["choices"][0]["message"]["content"] == "Mira lives in Ashford."
    usage = second["usage"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["prompt_tokens_details"]["cached_tokens"] == servers.full_blocks(usage["prompt_tokens"] - 1)
