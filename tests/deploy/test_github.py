"""The workflows and issue forms agree with the project; `make test-deploy` checks them by schema and with linters."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.name: path.read_text("utf-8") for path in sorted((GITHUB / "workflows").glob("*.yml"))}
TARGETS = set(re.findall(r"(?m)^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8")))
PINNED = re.compile(r"(\./\.github/workflows/(?P<own>[\w.]+)|[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+)")


def unpinned(text: str) -> list[str]:
    """Return what a workflow uses that is neither an action by commit and version, nor a workflow of ours."""
    used = re.findall(r"uses: (.+)", text)
    return [each for each in used if not (found := PINNED.fullmatch(each)) or found["own"] not in (None, *WORKFLOWS)]


def missing_targets(text: str) -> set[str]:
    """Return the targets of make that a workflow runs and the Makefile lacks."""
    lines = re.findall(r"\bmake (?:-s )?((?:[a-z-]+ ?)+)", "\n".join(commands(yaml.safe_load(text))))
    return {target for line in lines for target in line.split()} - TARGETS


def commands(workflow: dict[str, Any]) -> Iterator[str]:
    """Yield the shell lines of a workflow."""
    for job in workflow["jobs"].values():
        yield from (step["run"] for step in job.get("steps", ()) if "run" in step)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows(name: str) -> None:
    """Actions are pinned by commit, jobs have only the permissions that they name, and targets of make exist."""
    text = WORKFLOWS[name]
    workflow = yaml.safe_load(text)
    assert unpinned(text) == []
    assert workflow["permissions"] == {}
    assert all(job["permissions"] for job in workflow["jobs"].values())
    assert all("uses" in job or job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())
    assert missing_targets(text) == set()


def test_faults_are_found() -> None:
    """An action by tag or branch, another workflow that does not exist, and an unknown target are found."""
    for used in ("actions/checkout@v5", f"actions/checkout@{'0' * 40}", "./.github/workflows/none.yml"):
        assert unpinned(f"uses: {used}") == [used]
    assert missing_targets("jobs: {a: {steps: [{run: make lint nothing}]}}") == {"nothing"}


def test_one_commit_for_each_action() -> None:
    """Every workflow uses the same version of an action."""
    used = {line.strip() for text in WORKFLOWS.values() for line in re.findall(r"uses: (\S+@.+)", text)}
    assert len(used) == len({each.partition("@")[0] for each in used})


def test_pythons() -> None:
    """The tests run with every Python that the metadata names, and with the one that it is yet to name."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["classifiers"]
    named = [found[1] for each in classifiers if (found := re.fullmatch(r".* :: (3\.\d+)", each))]
    run = yaml.safe_load(WORKFLOWS["ci.yml"])["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert run[:-1] == named
    assert f"matrix.python == '{run[-1]}'" in WORKFLOWS["ci.yml"], "the last may fail"


def test_forms_ask_for_the_machine() -> None:
    """Every form asks for what `quipu doctor --json` prints, and bugs cannot be reported without it."""
    forms = {path.name: yaml.safe_load(path.read_text("utf-8")) for path in GITHUB.glob("ISSUE_TEMPLATE/[0-9]*.yml")}
    assert len(forms) == 3
    for name, form in forms.items():
        (field,) = (field for field in form["body"] if field.get("id") == "doctor")
        assert field["attributes"]["label"] == "`quipu doctor --json`"
        assert "wish" in name or field["validations"] == {"required": True}
