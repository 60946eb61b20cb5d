"""The distribution: wheel and sdist build, and the wheel, installed in a clean environment, serves from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return folder


def test_contents(distribution: Path) -> None:
    """The wheel has every module, the demo model and the licence, and nothing of tests or benchmarks."""
    (wheel,) = distribution.glob("quipu_llm-*.whl")
    (sdist,) = distribution.glob("quipu_llm-*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("actors", "kernels", "web"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"quipu/{path.relative_to(ROOT)}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"quipu", "quipu_llm"}
    assert sum(info.file_size for info in zipfile.ZipFile(wheel).infolist() if "/demo/" in info.filename) <= 6_000_000
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/actors/wiring.py") for name in archive.getnames())


def test_installed_wheel_serves(distribution: Path, tmp_path: Path) -> None:
    """In a clean environment that has our dependencies and the wheel, the end-to-end tests of usage pass.

    The dependencies are those of this environment, by path, so that nothing large is installed twice; this checkout is
    not on that path.
    """
    (wheel,) = distribution.glob("quipu_llm-*.whl")
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # a .pth file inside of a folder that is named by one is not read: the editable install stays behind
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--quiet"]
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True, timeout=60
    )
    where = [str(environment / "bin" / "python"), "-P", "-c", "import quipu.web.cli as m; print(m.__file__)"]
    found = subprocess.run(where, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert Path(found).is_relative_to(packages)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/e2e/test_client_usage.py"],
        cwd=ROOT,
        env={**os.environ, "QUIPU_COMMAND": str(environment / "bin" / "quipu")},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout
