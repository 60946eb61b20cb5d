"""The repository layout: symlinks, versions, the native module, and what the web process imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["actors", "kernels", "web"])
def test_links(name: str) -> None:
    """The three folders are importable as `quipu.<name>` through committed relative symlinks, and only that way."""
    link = ROOT / "src" / "quipu" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / ".." / name
    assert link.resolve() == ROOT / name
    assert not (ROOT / name / "__init__.py").exists(), "it must not be importable as a top-level package"


def test_versions_agree() -> None:
    """The package, its metadata and the changelog have the same version."""
    import tomllib

    import quipu

    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert metadata["project"]["version"] == quipu.__version__
    assert quipu.__version__ in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler: the engine runs in pure Python")
def test_native_module_is_used() -> None:
    """If there is a compiler, the installation has built the C module and the engine uses it."""
    code = """
        import sys
        from quipu.actors.shared.block_keys import chain_keys, chain_keys_in_python
        from quipu.actors.engine.block_manager.pools import make_pool
        from quipu.actors.engine.block_manager.block_pool import BlockPool
        pool = make_pool(2)
        sys.exit(chain_keys is chain_keys_in_python or isinstance(pool, BlockPool))
    """
    for setting, expected in (("1", 0), ("0", 1)):
        environment = {**os.environ, "QUIPU_COMPILED": setting}
        command = [sys.executable, "-P", "-c", textwrap.dedent(code)]
        assert subprocess.run(command, env=environment, check=False).returncode == expected


def test_web_process_does_not_load_torch() -> None:
    """Importing everything that the web process runs does not import torch."""
    code = """
        import sys
        import quipu.actors.wiring, quipu.web.cli.cli, quipu.web.app, quipu.web.http.server
        loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "transformers"))
        sys.exit(f"loaded: {loaded}" if loaded else 0)
    """
    subprocess.run([sys.executable, "-P", "-c", textwrap.dedent(code)], check=True)
