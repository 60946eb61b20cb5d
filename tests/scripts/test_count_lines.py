"""`python -m scripts.count_lines`: what it counts, in a repository made for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.count_lines import count, table


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    git("init", "--quiet")
    for name, text in (
        ("actors/a.py", "x\n\n# y\n"),
        ("web/b/c.py", "z\n"),
        ("web/d.js", "n\n"),
        ("tests/t.py", "n\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    commit()
    return tmp_path


def git(*arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True, capture_output=True)


def commit() -> None:
    git("add", "--all")
    git("commit", "--quiet", "--message", "m")


def test_lines_of_two_commits(repository: Path) -> None:
    """All lines of the product's Python files count, as they are in each commit, and nothing else."""
    (repository / "web/b/c.py").write_text("")
    (repository / "kernels").mkdir()
    (repository / "kernels/e.py").write_text("1\n2\n3\n")
    commit()
    (repository / "kernels/e.py").write_text("not committed\n" * 9)
    assert dict(count("HEAD~1")) == {"actors": 3, "web": 1}
    assert dict(count("HEAD")) == {"actors": 3, "kernels": 3}
    assert table(["HEAD~1", "HEAD"]).splitlines()[-1].split() == ["all", "4", "6", "+2"]


def test_unknown_commit(repository: Path) -> None:
    """A commit that does not exist is an error, not zero lines."""
    with pytest.raises(subprocess.CalledProcessError):
        count("0123abc")
