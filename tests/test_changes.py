"""What `changes/` says of the next release: each file's name, its type, and a text for users whose links resolve.

`make test-release` runs towncrier itself on these files.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "changes"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["towncrier"]
TYPES = {each["directory"] for each in SETTINGS["type"]}
NAME = re.compile(r"\+[a-z0-9-]+\.([a-z]+)\.md")
MAX_LINE, MAX_TEXT = 125, 800


def faults(name: str, text: str) -> Iterator[str]:
    """Yield what is wrong with a file of `changes/`."""
    found = NAME.fullmatch(name)
    if found is None:
        yield "its name is not +NAME.TYPE.md"
    elif found[1] not in TYPES:
        yield f"its type is none of {', '.join(sorted(TYPES))}"
    if not re.fullmatch(r"[A-Z`].*[.)]\n", text, flags=re.S):
        yield "its text is not sentences, which end with a period and a line break"
    if re.search(r"^(?:[-*#>|]|\s)|\n\n", text, flags=re.M):
        yield "it has a list, a heading, a table or paragraphs"
    if len(text) > MAX_TEXT or any(len(line) > MAX_LINE for line in text.splitlines()):
        yield f"it has more than {MAX_TEXT} characters, or {MAX_LINE} on a line"
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target) and not (ROOT / target.partition("#")[0]).is_file():
            yield f"there is no {target}; links are relative to CHANGELOG.md"


def test_files_of_changes() -> None:
    """Every file has a name and a type that towncrier takes up, and a text that fits CHANGELOG.md."""
    files = [path for path in FOLDER.iterdir() if path.name != "README.md"]
    assert {path.name: wrong for path in files if (wrong := list(faults(path.name, path.read_text("utf-8"))))} == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("doctor.added.md", "Text.\n"),
        ("+doctor.feature.md", "Text.\n"),
        ("+doctor.added", "Text.\n"),
        ("+Doctor.added.md", "Text.\n"),
        ("+doctor.added.md", "Text"),
        ("+doctor.added.md", "- Text.\n"),
        ("+doctor.added.md", "Text.\n\nMore.\n"),
        ("+doctor.added.md", f"{'Text ' * 30}.\n"),
        ("+doctor.added.md", "A text ([docs/nothing.md](docs/nothing.md)).\n"),
    ],
)
def test_wrong_files_are_found(name: str, text: str) -> None:
    """A name without a type, a text that is a list, and a link that leads nowhere from CHANGELOG.md are found."""
    assert list(faults(name, text)) != []


def test_right_file_passes() -> None:
    """A sentence with a link passes."""
    assert list(faults("+doctor-2.added.md", "`quipu doctor` ([docs/README.md](docs/README.md#use)).\n")) == []


def test_page_lists_the_types() -> None:
    """The page beside the files explains every type, in the order of the changelog."""
    table = re.findall(r"^\| `([a-z]+)` \|", (FOLDER / "README.md").read_text("utf-8"), flags=re.M)
    assert table == [each["directory"] for each in SETTINGS["type"]]
    assert SETTINGS["directory"] == FOLDER.name


def test_changelog_takes_fragments() -> None:
    """CHANGELOG.md has the line below which a release writes, above the newest release."""
    text = (ROOT / SETTINGS["filename"]).read_text("utf-8")
    assert text.count("<!-- towncrier release notes start -->\n") == 1
    assert text.index("<!-- towncrier") < text.index("\n## ")
