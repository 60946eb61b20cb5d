"""The files for containers, checked as far as this works without Docker and Kubernetes.

`compose.yaml` by the Compose specification's schema; the Helm chart by its own schema of values, rendered with the
libraries that Helm renders with (Go's templates and sprig; not with helm), and by the schemas of Kubernetes' API; the
Dockerfile by running the shell lines of its stages in a folder, and then its command and its health check.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import yaml

from tests.deploy.checks import CannotRun, Failed, program, run
from tests.deploy.watching import python_with_schemas
from tests.e2e.servers import Server
from tests.processes import eventually

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE, IGNORED, COMPOSE = ROOT / "Dockerfile", ROOT / ".dockerignore", ROOT / "deploy" / "compose.yaml"
CHART = ROOT / "deploy" / "helm" / "quipu"
KUBERNETES = ("1.27", "1.31", "1.34")
GO_SOURCES = Path("/usr/share/gocode")
"""Where Debian's packages of Go libraries are."""
VALUES: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "everything": {
        "replicas": 3,
        "model": "Qwen/Qwen3-0.6B",
        "args": ["--engines", "2", "--kv-cache-memory=8GiB"],
        "image": {"tag": "1.2.3"},
        "imagePullSecrets": [{"name": "registry"}],
        "keys": {"existingSecret": "keys", "metricsSecret": "prometheus"},
        "ledger": {"existingSecret": "database"},
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "persistence": {"storageClass": "fast"},
        "cache": {"persistent": False},
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "runtimeClassName": "nvidia",
    },
}
"""Values that are merged into the chart's."""


@attrs.frozen
class Stage:
    """A part of a Dockerfile that begins with FROM."""

    name: str
    instructions: list[tuple[str, str]]
    """Each with its argument, in order."""

    def last(self, instruction: str) -> str:
        return next(argument for name, argument in reversed(self.instructions) if name == instruction)


def read_stages(text: str) -> list[Stage]:
    """Return the stages of a Dockerfile."""
    lines = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    stages: list[Stage] = []
    for line in filter(None, map(str.strip, lines.splitlines())):
        instruction, _, argument = line.partition(" ")
        if instruction == "FROM":
            stages.append(Stage(argument.partition(" AS ")[2], []))
        elif stages:
            stages[-1].instructions.append((instruction, argument.strip()))
    return stages


def copy_context(folder: Path) -> None:
    """Copy what `.dockerignore` lets through: it leaves out everything, and takes in names of this folder."""
    names = [line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")]
    for name in names:
        if (ROOT / name).is_dir():
            leave_out = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=leave_out)
        else:
            shutil.copy(ROOT / name, folder)


def check_dockerfile(folder: Path) -> str:
    """Run the stages' shell lines for CPUs with this machine's Python, then the image's command and health check.

    Not run: building an image, apt-get, the user, and DEVICE=gpu. torch comes from where pip is set up to look.
    """
    wheel, install, image = read_stages(DOCKERFILE.read_text())
    context = folder / "build"
    context.mkdir()
    copy_context(context)
    places = {"/opt/quipu": folder / "quipu", "/wheels": folder / "wheels", "/build": context}
    environment = {**os.environ, "DEVICE": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for stage in (wheel, install):
        for instruction, argument in stage.instructions:
            if instruction == "RUN" and "apt-get" not in argument:
                for there, here in places.items():
                    argument = argument.replace(there, str(here))
                argument = argument.replace("--no-deps --index-url https://download.pytorch.org/whl/cpu", "")
                argument = re.sub(r"\bpython -m", f"{shlex.quote(_python())} -m", argument)
                run("sh", "-ec", argument, cwd=context, environment=environment)
    command = [*json.loads(image.last("ENTRYPOINT")), *json.loads(image.last("CMD"))]
    command[0] = str(folder / "quipu" / "bin" / command[0])
    command = [word.replace("0.0.0.0", "127.0.0.1").replace("/data", str(folder / "data")) for word in command]
    _, _, check = image.last("HEALTHCHECK").partition("CMD ")
    return _serve_and_probe(command, json.loads(check), folder)


def _serve_and_probe(command: list[str], check: list[str], folder: Path) -> str:
    log_path = folder / "served.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen([*command, "--port", "0"], stderr=log, cwd=folder)
    server = Server(process, log_path)
    try:
        server.wait_listening()
        server.wait_ready()
        probe = [word.replace("http://127.0.0.1:8000", server.url) for word in check]
        run(str(folder / "quipu" / "bin" / probe[0]), *probe[1:])
        body = {"model": "demo", "messages": [{"role": "user", "content": "Where does Mira live?"}], "max_tokens": 4}
        server.post("/v1/chat/completions", body).raise_for_status()
        if (code := server.stop()) != 0:
            raise Failed(f"SIGTERM ended the server with {code}")
    finally:
        process.kill()
        process.wait()
    eventually(lambda: run_fails(probe), "the health check of a stopped server fails")
    return "its shell lines for CPUs, command and health check; building an image and DEVICE=gpu were not run"


def run_fails(command: list[str]) -> bool:
    return subprocess.run([_python(), *command[1:]], capture_output=True).returncode != 0


def _python() -> str:
    """Return the Python that this environment was made with."""
    return str(Path(sys.base_prefix) / "bin" / "python3")


def check_compose(_: Path) -> str:
    """Have the Compose specification's schema read the file."""
    tool = Path(python_with_schemas()).with_name("check-jsonschema")
    run(str(tool), "--builtin-schema", "vendor.compose-spec", str(COMPOSE))
    return "by the specification's schema; not run: there is no Docker"


def render(values: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects that a chart makes of values."""
    go = program("go", "golang-go golang-github-masterminds-sprig-dev golang-k8s-sigs-yaml-dev")
    if not GO_SOURCES.exists():
        raise CannotRun("not run: there is no sprig (Debian: golang-github-masterminds-sprig-dev)")
    executable = folder / "helm_render"
    if not executable.exists():
        environment = {
            **os.environ,
            "GOPATH": str(GO_SOURCES),
            "GO111MODULE": "off",
            "GOFLAGS": "",
            "GOCACHE": str(folder / "go"),
        }
        source = ROOT / "tests" / "deploy" / "helm_render" / "main.go"
        run(go, "build", "-o", str(executable), str(source), environment=environment)
    chart = {
        key[:1].upper() + key[1:]: value for key, value in yaml.safe_load((CHART / "Chart.yaml").read_text()).items()
    }
    release = {"Name": "one", "Namespace": "default", "Service": "Helm"}
    given = json.dumps({"Values": values, "Chart": chart, "Release": release})
    rendered = json.loads(run(str(executable), str(CHART / "templates"), stdin=given))
    for name, text in rendered.items():
        if name.endswith(".yaml"):
            yield from filter(None, yaml.safe_load_all(text))


def merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a chart's values with others on top, as Helm merges them."""
    both = dict(base)
    for key, value in other.items():
        both[key] = merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return both


def check_helm(folder: Path) -> str:
    """Render the chart with several values, and have Kubernetes' schemas read the objects."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    num_objects = 0
    for given in VALUES.values():
        values = merged(defaults, given)
        jsonschema.validate(values, schema)
        objects = list(render(values, folder))
        known = [one for one in objects if "coreos" not in one["apiVersion"]]
        script = str(ROOT / "tests" / "deploy" / "kubernetes_schema.py")
        for version in KUBERNETES:
            run(python_with_schemas(), script, version, stdin=json.dumps(known))
        check_objects(objects)
        num_objects += len(objects)
    versions = ", ".join(KUBERNETES)
    return f"{num_objects} objects of {len(VALUES)} sets of values, for Kubernetes {versions}; not rendered by helm"


def check_objects(objects: list[dict[str, Any]]) -> None:
    """Raise Failed if what refers to another object or part does not find it."""
    by_kind = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    (servers,) = (one for one in objects if one["kind"] == "StatefulSet")
    labels = servers["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for port in servers["spec"]["template"]["spec"]["containers"][0]["ports"]}
    if ("Service", servers["spec"]["serviceName"]) not in by_kind:
        raise Failed("the StatefulSet's Service does not exist")
    for (kind, name), one in by_kind.items():
        if kind != "Service":
            continue
        if not one["spec"]["selector"].items() <= labels.items():
            raise Failed(f"Service {name} selects no pod")
        if {port["targetPort"] for port in one["spec"]["ports"]} - ports:
            raise Failed(f"Service {name} has a port that no container has")
    pod = servers["spec"]["template"]["spec"]
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    there = {volume["name"] for volume in pod["volumes"]}
    there |= {claim["metadata"]["name"] for claim in servers["spec"]["volumeClaimTemplates"]}
    if mounted != there:
        raise Failed(f"volumes {there} are mounted as {mounted}")
    for monitor in (one for one in objects if one["kind"] == "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        matching = [
            name
            for (kind, name), one in by_kind.items()
            if kind == "Service" and wanted <= one["metadata"]["labels"].items()
        ]
        if len(matching) != 1:
            raise Failed(f"the ServiceMonitor selects {matching}")
