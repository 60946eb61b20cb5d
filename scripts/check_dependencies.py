"""Have mypy read the types of every library that the sources import: `python -m scripts.check_dependencies`.

They change only with the environment and take four fifths of a first `make types`, so `make install-test` does this.
mypy keeps what it has read in .mypy_cache.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("actors", "kernels", "web", "tests", "bench", "scripts")
OURS = {"quipu", "tests", "bench", "scripts"}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports by their absolute names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def main() -> None:
    """Run mypy on the imports alone. What it says of them, `make types` says again."""
    names = {name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") for name in imported(path)}
    libraries = sorted(name for name in names if name.partition(".")[0] not in OURS | sys.stdlib_module_names)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "imports_of_all_sources.py"
        program.write_text("".join(f"import {name}\n" for name in libraries))
        subprocess.run([sys.executable, "-m", "mypy", program], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    main()
