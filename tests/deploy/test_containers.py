"""The Dockerfile, `compose.yaml` and the Helm chart: what they name exists, and they agree with each other.

What reads them is asked by `python -m tests.deploy`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

import quipu
from tests.deploy.containers import CHART, COMPOSE, DOCKERFILE, IGNORED, ROOT, VALUES, merged, read_stages
from tests.deploy.exported import LIST
from tests.deploy.rules import RULES

FLAGS = {flag.partition(",")[0].split()[0] for flag in json.loads(LIST.read_text())["flags"]["quipu serve"]}
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = "\n".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))


def flags_in(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_image_has_no_root_and_no_compiler() -> None:
    """The last stage runs as a user of its own, asks /health, and gets its packages from an earlier stage."""
    *earlier, image = read_stages(DOCKERFILE.read_text())
    assert [stage.name for stage in earlier] == ["wheel", "install"]
    assert image.last("USER").split(":")[0] not in ("0", "root")
    assert "/health" in image.last("HEALTHCHECK")
    runs = [argument for instruction, argument in image.instructions if instruction == "RUN"]
    assert not any("pip" in run or "g++" in run for run in runs)
    assert [run.startswith('if [ "$DEVICE" = gpu ]') for run in runs if "apt-get" in run] == [True]


def test_cpu_image_has_no_cuda() -> None:
    """For CPUs torch comes from PyTorch's index of CPU builds, before anything that requires torch."""
    _, install, _ = read_stages(DOCKERFILE.read_text())
    first, second = [argument for instruction, argument in install.instructions if instruction == "RUN"][1:]
    assert "--no-deps --index-url https://download.pytorch.org/whl/cpu" in first.partition("else")[2]
    assert "/wheels/" in second and "torch" not in second
    assert ("ARG", "DEVICE=cpu") in install.instructions


def test_context_has_what_a_wheel_is_built_from() -> None:
    """`.dockerignore` lets through exactly the sources and files that are named, and they exist."""
    lines = [line for line in IGNORED.read_text().splitlines() if line and not line.startswith("#")]
    names = {line[1:] for line in lines if line.startswith("!")}
    assert lines[0] == "*" and all((ROOT / name).exists() for name in names)
    links = {path.name for path in (ROOT / "src" / "quipu").iterdir() if path.is_symlink()}
    assert names == links | {"src", "pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"}


def test_commands_have_flags_that_exist() -> None:
    """Whatever starts a server in a container gives it flags that it has."""
    image = read_stages(DOCKERFILE.read_text())[-1]
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    chart = re.findall(r"^\s*- (--[a-z-]+)", TEMPLATES, flags=re.M)
    assert "--no-such-flag" not in FLAGS
    for words in (json.loads(image.last("CMD")), services["quipu"]["command"], chart):
        assert flags_in(words) and flags_in(words) <= FLAGS


def test_compose_mounts_what_there_is() -> None:
    """Files that are mounted exist, what services refer to is declared, and Prometheus is set up as in its own file."""
    compose = yaml.safe_load(COMPOSE.read_text())
    for service in compose["services"].values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert source in compose["volumes"] or (COMPOSE.parent / source).is_file(), mount
        assert {config["source"] for config in service.get("configs", ())} <= compose["configs"].keys()
        assert set(service.get("secrets", ())) <= compose["secrets"].keys()
        assert set(service.get("depends_on", ())) <= compose["services"].keys()
    inner = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    own = yaml.safe_load(RULES.with_name("prometheus.yml").read_text())
    for configuration in (inner, own):
        (job,) = configuration["scrape_configs"]
        job.pop("authorization", None), job.pop("static_configs")
    assert inner == own


def test_chart_is_of_this_version() -> None:
    """The chart starts the version that it comes with."""
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == quipu.__version__


@pytest.mark.parametrize("name", list(VALUES))
def test_values_match_their_schema(name: str) -> None:
    """The chart's values, and those that `python -m tests.deploy` renders it with, are what the schema asks for."""
    jsonschema.validate(merged(DEFAULTS, VALUES[name]), SCHEMA)


@pytest.mark.parametrize("wrong", [{"replica": 2}, {"replicas": "2"}, {"keys": {"secret": "a"}}, {"model": ""}])
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    """A misspelt value is an error, and so is one of another type."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(DEFAULTS, wrong), SCHEMA)


def test_templates_use_every_value() -> None:
    """Each value that a template reads has a default, and each default is read by a template."""
    read = {tuple(path.split(".")) for path in re.findall(r"\.Values\.([A-Za-z.]+)", TEMPLATES)}
    for path in read:
        value: Any = DEFAULTS
        for key in path:
            assert key in value, path
            value = value[key]
    assert {path[0] for path in read} == DEFAULTS.keys()
