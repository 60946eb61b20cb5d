"""Rules for every product file: its size, its import style, and that only an actor's `actor.py` is asynchronous."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("actors", "kernels", "web")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

MAX_NUM_LINES = 300
LONGER: dict[str, str] = {}
"""Files that may be longer than `MAX_NUM_LINES`, and why."""

ACTORS = (
    "tokenizer", "router", "engine/scheduler", "engine/block_manager", "engine/executor", "engine/mover", "detokenizer",
    "accountant", "fleet/upstreams",
)  # fmt: skip
SYNCHRONOUS = (*ACTORS, "cache_insight")
LOOPS = {"trio", "anyio", "asyncio"}

ABSOLUTE = {"actors/ledger/migrations/env.py": "Alembic runs this file by its path, outside any package"}
"""Files that may import their own folder absolutely, and why."""

REPEATED = {
    # each folder of its kind has one
    "__init__", "actor", "answer", "config", "fields", "models", "ops", "routes", "shapes", "supervisor", "usage",
    "usage_record",
    # the command and the decisions behind it
    "engine", "keys", "prompts", "files",
    # models, backends, and the operations of both
    "attention", "experts", "logprobs", "refusals", "sampler", "sampling", "scores",
}  # fmt: skip
"""File names that occur in several folders because they mean the same thing there."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def wrong_imports(source: str, name: str) -> Iterator[str]:
    """Yield each import in file `name` that is absolute within its top folder, or relative across top folders."""
    top = name.partition("/")[0]
    depth = name.count("/")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level > depth:
                yield f"{name}:{node.lineno}: a relative import that leaves {top}/"
            continue
        else:
            continue
        if any(f"{module}.".startswith(f"quipu.{top}.") for module in modules):
            yield f"{name}:{node.lineno}: an absolute import within {top}/"


def waits(source: str, name: str) -> Iterator[str]:
    """Yield each asynchronous line of `source`; the signatures of a Protocol's methods do not count."""
    tree = ast.parse(source)
    signatures = {
        method
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
        for method in node.body
        if isinstance(method, ast.AsyncFunctionDef) and all(isinstance(line, ast.Expr) for line in method.body)
    }
    for node in ast.walk(tree):
        match node:
            case ast.AsyncFunctionDef() if node not in signatures:
                yield f"{name}:{node.lineno}: async def {node.name}"
            case ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                yield f"{name}:{node.lineno}: {ast.unparse(node).partition(chr(10))[0]}"
            case ast.Import() if {alias.name.partition(".")[0] for alias in node.names} & LOOPS:
                yield f"{name}:{node.lineno}: {ast.unparse(node)}"
            case ast.ImportFrom() if node.level == 0 and (node.module or "").partition(".")[0] in LOOPS:
                yield f"{name}:{node.lineno}: {ast.unparse(node)}"
            case ast.comprehension() if node.is_async:
                yield f"{name}: an async comprehension over {ast.unparse(node.iter)}"


def test_file_sizes() -> None:
    """A product file has at most 300 lines: a longer one usually has two subjects."""
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    too_long = {name: length for name, length in lengths.items() if length > MAX_NUM_LINES and name not in LONGER}
    assert not too_long, "split these, or give a reason in LONGER"


def test_import_style() -> None:
    """Imports are relative within a top folder and absolute across, so that a file resolves the same by either path."""
    wrong = [
        line
        for path in FILES
        if name_of(path) not in ABSOLUTE
        for line in wrong_imports(path.read_text(), name_of(path))
    ]
    assert not wrong


@pytest.mark.parametrize(
    "line",
    [
        "from quipu.actors.messages.counts import Counts",
        "from quipu.actors import config",
        "from quipu import actors",
        "import quipu.actors.config.runtime_config",
        "from ....web.options import Options",
        "def later():\n    from quipu.actors.config.runtime_config import EngineConfig",
    ],
)
def test_planted_imports_are_found(line: str) -> None:
    """Every form of a wrong import is detected, also within functions."""
    assert list(wrong_imports(line, "actors/engine/scheduler/planted.py"))


@pytest.mark.parametrize("line", ["from ..messages import counts", "from . import x", "import quipu.kernels.batch"])
def test_right_imports_pass(line: str) -> None:
    """Relative imports within the top folder and absolute ones across pass."""
    assert not list(wrong_imports(line, "actors/engine/scheduler/planted.py"))


def test_only_actor_py_waits() -> None:
    """Everything next to an actor's `actor.py` is synchronous: it can be read and tested without an event loop."""
    found = [
        line
        for folder in SYNCHRONOUS
        for path in (ROOT / "actors" / folder).rglob("*.py")
        if path.name != "actor.py"
        for line in waits(path.read_text(), name_of(path))
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "async def wait(): pass",
        "class Desk:\n    async def wait(self): ...",
        "class Desk(Protocol):\n    async def wait(self):\n        return 1",
        "import trio",
        "import trio.lowlevel as low",
        "from trio import Event",
        "def later():\n    from anyio import sleep",
    ],
)
def test_planted_waits_are_found(source: str) -> None:
    """Coroutines and event loops are detected anywhere in a file."""
    assert list(waits(source, "planted.py"))


def test_protocol_signatures_are_allowed() -> None:
    """A Protocol may declare methods that an actor awaits."""
    source = 'class Desk(Protocol):\n    async def wait(self) -> None:\n        """Wait for the reply."""\n'
    assert not list(waits(source, "planted.py"))


def test_file_names_are_unique() -> None:
    """Files in different folders share a name only if it means the same in both (see `REPEATED`)."""
    counted = Counter(path.stem for path in FILES)
    assert {stem for stem, number in counted.items() if number > 1} <= REPEATED


def test_every_actor_has_a_folder() -> None:
    """The folders that these rules apply to are those with an `actor.py`."""
    found = {path.parent.relative_to(ROOT / "actors").as_posix() for path in (ROOT / "actors").rglob("actor.py")}
    assert found == set(ACTORS)
