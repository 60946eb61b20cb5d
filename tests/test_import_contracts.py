"""The import contracts of pyproject.toml: each detects a violation that is planted in a copy of the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).resolve().parent.parent
CONTRACTS = {
    contract["id"]: contract["name"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}


@attrs.frozen
class Plant:
    """New files that break a contract, and what the linter must report under the contract's name."""

    files: Mapping[str, str]
    complaint: str


def one_import(importer: str, imported: str) -> Plant:
    """Plant a module `importer` (such as `actors.shared.planted`) that imports another one."""
    return Plant({f"{importer.replace('.', '/')}.py": f"import {imported}\n"}, f"quipu.{importer} -> {imported} (l.1)")


PLANTS = {
    "actors-layers": [
        one_import("actors.tokenizer.planted_actor", "quipu.actors.router.actor"),
        one_import("actors.messages.planted_shared", "quipu.actors.shared.block_keys"),
        one_import("actors.shared.planted_wiring", "quipu.actors.wiring"),
    ],
    "engine-layers": [one_import("actors.engine.scheduler.planted_server", "quipu.actors.engine.engine_server")],
    "fleet-layers": [one_import("actors.fleet.processes.planted_cluster", "quipu.actors.fleet.cluster.keeper")],
    "engine-actors-below-fleet": [one_import("actors.engine.scheduler.planted_fleet", "quipu.actors.fleet.scaling")],
    "actors-apart": [
        one_import("actors.engine.scheduler.planted_actor", "quipu.actors.engine.executor.actor"),
        one_import("actors.engine.executor.planted_actor", "quipu.actors.tokenizer.encoder"),
    ],
    "only-actor-waits": [
        one_import("actors.shared.planted_trio", "trio"),
        one_import("actors.grammars.planted_trio", "trio"),
        one_import("actors.messages.planted_structlog", "structlog"),
        one_import("actors.engine.block_manager.planted_trio", "trio"),
        one_import("actors.detokenizer.planted_anyio", "anyio"),
    ],
    "only-executor-knows-kernels": [
        one_import("actors.tokenizer.planted_kernels", "quipu.kernels.batch"),
        one_import("web.api.planted_kernels", "quipu.kernels.batch"),
    ],
    "torch-in-kernels": [
        one_import("actors.engine.executor.planted_torch", "torch"),
        one_import("web.cli.planted_torch", "torch"),
    ],
    "kernels-below": [
        one_import("kernels.cpu.planted_actors", "quipu.actors.config.runtime_config"),
        one_import("kernels.models.planted_web", "quipu.web.options"),
        one_import("kernels.sampling.planted_trio", "trio"),
    ],
    "kernels-layers": [
        one_import("kernels.cpu.planted_backend", "quipu.kernels.triton"),
        one_import("kernels.models.planted_backend", "quipu.kernels.backend"),
    ],
    "actors-below": [
        one_import("actors.ledger.planted_web", "quipu.web.options"),
        one_import("actors.request_desk.planted_quart", "quart"),
    ],
    "http-below": [one_import("web.http.planted_actors", "quipu.actors.config.runtime_config")],
    "apis-apart": [
        one_import("web.api.anthropic.planted_openai", "quipu.web.api.openai.chat"),
        one_import("web.api.openai.planted_models", "quipu.web.api.models"),
    ],
    "web-layers": [
        one_import("web.auth.planted_cli", "quipu.web.cli.settings"),
        one_import("web.http.planted_api", "quipu.web.api.fields"),
        one_import("web.telemetry.planted_request", "quipu.web.request.errors"),
        one_import("web.request.planted_auth", "quipu.web.auth.keys"),
    ],
    "no-circles": [
        Plant(  # between two modules
            {
                "web/http/planted/__init__.py": "",
                "web/http/planted/one.py": "from . import two\n",
                "web/http/planted/two.py": "def later():\n    from . import one\n",
            },
            "No cycles are allowed in quipu.web.http.planted.",
        ),
        Plant(  # between two packages whose modules have no cycle
            {
                "kernels/cpu/planted/__init__.py": "",
                "kernels/cpu/planted/left/__init__.py": "",
                "kernels/cpu/planted/left/above.py": "from ..right import below\n",
                "kernels/cpu/planted/left/below.py": "",
                "kernels/cpu/planted/right/__init__.py": "",
                "kernels/cpu/planted/right/above.py": "from ..left import below\n",
                "kernels/cpu/planted/right/below.py": "",
            },
            "No cycles are allowed in quipu.kernels.cpu.planted.",
        ),
    ],
}


def complaints(copy: Path) -> dict[str, str]:
    """Run the linter in `copy`; return its report on each broken contract, by the contract's name."""
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    result = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        cwd=copy,
        env={"PYTHONPATH": str(copy / "src"), "PATH": os.defpath, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    sections = re.split(r"^(.+)\n-+\n", result.stdout.partition("Broken contracts")[2], flags=re.MULTILINE)[1:]
    return dict(zip(sections[::2], sections[1::2], strict=True))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a copy of the sources, in which `src/quipu` links to the copy's three folders."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("actors", "kernels", "web", "src"):
        shutil.copytree(
            ROOT / name,
            copy / name,
            symlinks=True,
            ignore=lambda folder, names: [
                name for name in names if not name.endswith(".py") and Path(folder, name).is_file()
            ],
        )
    shutil.copy2(ROOT / "pyproject.toml", copy)
    return copy


@pytest.fixture(scope="module")
def found(copy: Path) -> dict[str, str]:
    """Run the linter on a copy in which every violation of `PLANTS` is planted."""
    for plant in [plant for plants in PLANTS.values() for plant in plants]:
        for name, text in plant.files.items():
            (copy / name).parent.mkdir(exist_ok=True)
            (copy / name).write_text(text)
    return complaints(copy)


def test_every_contract_has_a_planted_violation() -> None:
    """Every contract in pyproject.toml has a violation in `PLANTS`."""
    assert set(PLANTS) == set(CONTRACTS)


@pytest.mark.parametrize(
    ("contract", "plant"),
    [pytest.param(name, plant, id=plant.complaint) for name, plants in PLANTS.items() for plant in plants],
)
def test_planted_violation_is_found(found: dict[str, str], contract: str, plant: Plant) -> None:
    """The linter reports each planted violation under the contract that forbids it."""
    assert plant.complaint in found.get(CONTRACTS[contract], "")


@pytest.mark.parametrize(
    ("contract", "folder"),
    [("actors-layers", "actors"), ("kernels-layers", "kernels"), ("web-layers", "web"), ("apis-apart", "web/api")],
    ids=["actors", "kernels", "web", "api"],
)
def test_new_package_needs_a_layer(copy: Path, contract: str, folder: str) -> None:
    """A package that no layer names breaks the contract of its folder."""
    package = copy / folder / "planted_package"
    package.mkdir()
    try:
        (package / "__init__.py").write_text("")
        assert "planted_package" in complaints(copy).get(CONTRACTS[contract], "")
    finally:
        shutil.rmtree(package)
