"""A release in a temporary clone; towncrier and the build are stand-ins here, and real in `make test-release`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import quipu
from scripts import release
from scripts.release import ROOT, VERSIONED, CannotRelease, check_repository, check_version, clone_of, prepare, run

URLS = '\n[project.urls]\nSource = "https://localhost/quipu"\n'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository with the files that a release changes."""
    folder = tmp_path / "repository"
    for name in (*VERSIONED, "CHANGELOG.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    with (folder / "pyproject.toml").open("a") as file:
        file.write(URLS)
    (folder / "changes").mkdir()
    (folder / "changes" / "+a.added.md").write_text("A thing.\n")
    run("git", "init", "--quiet", "--initial-branch", "main", folder=folder)
    for name, value in (("user.name", "Somebody"), ("user.email", "somebody@localhost")):
        run("git", "config", name, value, folder=folder)
    run("git", "add", "--all", folder=folder)
    run("git", "commit", "--quiet", "--message", "Begin", folder=folder)
    return folder


def stand_in_notes(folder: Path, version: str) -> None:
    """Do with `changes/` what towncrier does."""
    (fragment,) = (folder / "changes").iterdir()
    path, line = folder / "CHANGELOG.md", "<!-- towncrier release notes start -->\n"
    news = f"{line}\n## {version} (2026-12-01)\n\n### Added\n\n- {fragment.read_text()}\n"
    path.write_text(path.read_text().replace(line, news, 1))
    fragment.unlink()


def stand_in_build(folder: Path, out: Path) -> None:
    """Write a wheel's name; fail if the version is 9.9.9."""
    if '"9.9.9"' in (folder / "pyproject.toml").read_text():
        raise CannotRelease("twine: no")
    out.mkdir()
    (out / "quipu_llm-cp311-abi3.whl").write_bytes(b"wheel")


def prepared(repository: Path, version: str) -> tuple[Path, Path, str]:
    """Prepare a release of `repository`; return the clone, the folder of files, and the notes."""
    folder = repository.parent / version
    folder.mkdir()
    clone = clone_of(repository, folder)
    notes = prepare(clone, folder / "dist", version, write_notes=stand_in_notes, build=stand_in_build)
    return clone, folder / "dist", notes


def versions_in(folder: Path) -> set[str]:
    """Return the versions that the files of a checkout have."""
    return {found for name, pattern in VERSIONED.items() for found in re.findall(pattern, (folder / name).read_text())}


def test_files_agree() -> None:
    """Every file that has the version has the same."""
    assert versions_in(ROOT) == {quipu.__version__}


def test_release(repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The version is set in every file, the news are in the changelog, and commit, tag and files come over together."""
    before = run("git", "rev-parse", "HEAD", folder=repository)
    clone, out, notes = prepared(repository, "7.1.0")
    assert notes.startswith("### Added\n\n- A thing.\n")
    assert run("git", "rev-parse", "HEAD", folder=repository) == before
    assert run("git", "tag", folder=repository) == ""
    release.take_over(repository, clone, "7.1.0", out)
    assert versions_in(repository) == {"7.1.0"}
    assert run("git", "log", "-1", "--format=%s by %an", "v7.1.0", folder=repository) == "Release 7.1.0 by Somebody"
    assert run("git", "describe", folder=repository) == "v7.1.0"
    assert not list(repository.glob("changes/*"))
    assert (repository / "dist" / "quipu_llm-cp311-abi3.whl").read_bytes() == b"wheel"
    assert "git push --atomic origin main v7.1.0" in capsys.readouterr().out
    with pytest.raises(CannotRelease, match=r"v7\.1\.0 has been released; 7\.0\.9 is not newer"):
        prepared(repository, "7.0.9")


def test_failed_check_leaves_nothing(repository: Path) -> None:
    """If a check of the files fails there is no tag, and the repository is as it was."""
    before = run("git", "rev-parse", "HEAD", folder=repository)
    with pytest.raises(CannotRelease, match="twine: no"):
        prepared(repository, "9.9.9")
    assert run("git", "tag", folder=repository.parent / "9.9.9" / "quipu") == ""
    assert run("git", "rev-parse", "HEAD", folder=repository) == before
    assert run("git", "status", "--porcelain", folder=repository) == ""


def test_what_keeps_a_release(repository: Path) -> None:
    """Metadata without addresses, another branch, one that is not the remote's, and changes are refused."""
    check_repository(repository)
    run("git", "update-ref", "refs/remotes/origin/main", "HEAD", folder=repository)
    check_repository(repository)
    path = repository / "pyproject.toml"
    path.write_text(path.read_text().replace(URLS, ""))
    with pytest.raises(CannotRelease, match=r"remove these first:\n.*pyproject\.toml"):
        check_repository(repository)
    run("git", "commit", "--quiet", "--all", "--message", "Remove addresses", folder=repository)
    with pytest.raises(CannotRelease, match="not origin/main"):
        check_repository(repository)
    run("git", "update-ref", "refs/remotes/origin/main", "HEAD", folder=repository)
    with pytest.raises(CannotRelease, match=r"no \[project\.urls\]"):
        check_repository(repository)
    run("git", "switch", "--quiet", "--create", "topic", folder=repository)
    with pytest.raises(CannotRelease, match="this is topic"):
        check_repository(repository)


@pytest.mark.parametrize("version", ["1", "1.0.0.dev1", "v1.0.0", "1.0.0+local", "one", "1.0.0-rc1"])
def test_invalid_versions(version: str) -> None:
    """A version that is not one, or not in its usual form, is refused."""
    with pytest.raises(CannotRelease):
        check_version(version, [])


def test_valid_versions() -> None:
    """A candidate comes before its release; other tags do not count."""
    check_version("1.0.0rc1", ["v0.9.0", "vllm-try", "stable"])
    check_version("1.0.0", ["v1.0.0rc1"])
    with pytest.raises(CannotRelease):
        check_version("1.0.0rc2", ["v1.0.0"])
