"""One Ray cluster for the tests of this folder."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.actors.fleet.cluster.ray_nodes import RayNodes, ray_environment, running_nodes
from tests.kept_in_folder import KeptInFolder


@contextmanager
def _running_cluster() -> Iterator[RayNodes]:
    # pytest's own temporary folders have paths that are too long for sockets
    folder = Path(tempfile.mkdtemp(prefix="quipu-ray-"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ray_environment(folder).items():
                patch.setenv(name, value)
            with running_nodes(folder) as nodes:
                yield nodes
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_cluster = KeptInFolder(Path(__file__).parent, _running_cluster)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_cluster)


@pytest.fixture
def ray_cluster() -> RayNodes:
    """Start Ray with a head node; tests add nodes and remove them again. No driver is connected.

    It ends with the folder, because its processes use a twentieth of a core even when idle.
    """
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed (pip install './quipu_llm-….whl[ray]')")
    return _cluster.get()
