"""Rules, alerts and the dashboard, checked by what reads them.

`promtool` tests the rules, a Prometheus that scrapes a real server evaluates them and every query of the dashboard, and
Grafana's schema has to know every field of it.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.alert_cases import CASES, promtool_tests, rules_without_annotations
from tests.deploy.checks import CannotRun, Failed, program, run, running
from tests.deploy.dashboard import DASHBOARD, for_prometheus, queries
from tests.deploy.exported import exported_samples
from tests.deploy.promql import selectors
from tests.deploy.rules import ROOT, RULES, read_rules
from tests.e2e.collector import collecting
from tests.e2e.prompts import token_prompt
from tests.e2e.servers import Server, serving
from tests.processes import PATIENCE_S, eventually

ENVIRONMENT = ROOT / ".venv-deploy" / "bin" / "python"
"""Has the schemas of others (`make test-deploy` creates it)."""
OF_THIS_MACHINE = {"QuipuDiskNearlyFull"}
"""Alerts that depend on the machine that the check runs on."""
NUM_SCRAPES = 5


def check_rules(folder: Path) -> str:
    """Have promtool check rules and configuration, and run the cases of the alerts."""
    promtool = program("promtool", "prometheus")
    for path in (RULES, RULES.with_name("prometheus.yml")):
        shutil.copy(path, folder)
    run(promtool, "check", "rules", "--lint-fatal", RULES.name, cwd=folder)
    run(promtool, "check", "config", "prometheus.yml", cwd=folder)
    (folder / "bare.yml").write_text(yaml.safe_dump(rules_without_annotations()))
    (folder / "cases.yml").write_text(yaml.safe_dump(promtool_tests("bare.yml")))
    run(promtool, "test", "rules", "cases.yml", cwd=folder)
    num_alerts = sum(rule.is_alert for rule in read_rules())
    return f"{len(read_rules())} rules, {num_alerts} alerts in {len(CASES)} cases"


def check_grafana_schema(_: Path) -> str:
    """Have Grafana's schema read the dashboard."""
    return run(python_with_schemas(), str(ROOT / "tests" / "deploy" / "grafana_schema.py"), str(DASHBOARD)).strip()


def python_with_schemas() -> str:
    """Return the Python that has the schemas of others. Raises CannotRun."""
    if not ENVIRONMENT.exists():
        raise CannotRun("not run: there is no .venv-deploy, which `make test-deploy` creates")
    return str(ENVIRONMENT)


def check_with_prometheus(folder: Path) -> str:
    """Have a Prometheus scrape a server under load; every rule and query must work, and nothing must be wrong.

    A query may find nothing only if the server has none of a metric's series, such as those of adapters.
    """
    flags = ["--executor", "fake", "--fake-step-seconds", "0", "--engines", "2", "--num-blocks", "60"]
    flags += ["--kv-host-memory", "1MiB", "--response-store", "1h"]
    with collecting() as collector:
        flags += ["--otlp-traces-endpoint", collector.url, "--usage-webhook", f"{collector.url}/usage"]
        with watched(folder, *flags) as (server, prometheus):
            num_scraped = 0
            while num_scraped < NUM_SCRAPES:
                for number in range(10):
                    _load(server, 10 * num_scraped + number)
                num_scraped = prometheus.num_scrapes()
            server.wait_at_rest()
            eventually(prometheus.has_evaluated, "Prometheus has evaluated all rules")
            prometheus.check_rules()
            num_queries = prometheus.check_queries()
    return f"{num_queries} queries and {len(read_rules())} rules on a real server"


@contextmanager
def watched(folder: Path, *flags: str) -> Iterator[tuple[Server, Prometheus]]:
    """Run a server, and a Prometheus that scrapes it every second and has the rules. Raises CannotRun."""
    executable = program("prometheus", "prometheus")
    with ExitStack() as stack:
        server = stack.enter_context(serving(folder / "served", *flags))
        prometheus = Prometheus(f"http://127.0.0.1:{_free_port()}")
        configuration = yaml.safe_load(RULES.with_name("prometheus.yml").read_text())
        configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        configuration["scrape_configs"][0]["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        shutil.copy(RULES, folder)
        command = [executable, "--config.file", "prometheus.yml", "--storage.tsdb.path", "series"]
        command += ["--web.listen-address", prometheus.url.removeprefix("http://")]
        stack.enter_context(running(*command, log_path=folder / "prometheus.log", cwd=folder))
        eventually(prometheus.is_ready, "Prometheus is ready")
        yield server, prometheus


def _load(server: Server, number: int) -> None:
    """Send prompts that are found in the cache and that are evicted, and once one that is refused."""
    for tag in ("same", f"new {number}"):
        server.complete(token_prompt(tag, 300), 8).raise_for_status()
    server.post("/v1/responses", {"model": "demo", "input": "A cord.", "max_output_tokens": 2}).raise_for_status()
    if number == 0:
        assert server.complete("A cord.", 1 << 20).status_code == 400


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an instant query. Raises Failed."""
        answer = httpx.post(f"{self.url}/api/v1/query", data={"query": expression}, timeout=PATIENCE_S).json()
        if answer["status"] != "success":
            raise Failed(f"{answer['error']}: {expression}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def query_range(self, expression: str, *, start: float, end: float) -> list[dict[str, Any]]:
        """Return the series of a query, a value each second. Raises Failed."""
        data = {"query": expression, "start": start, "end": end, "step": "1"}
        answer = httpx.post(f"{self.url}/api/v1/query_range", data=data, timeout=PATIENCE_S).json()
        if answer["status"] != "success":
            raise Failed(f"{answer['error']}: {expression}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def num_scrapes(self) -> int:
        found = self.query('count_over_time(up{job="quipu"}[10m])')
        return int(found[0]["value"][1]) if found else 0

    def rules(self) -> list[dict[str, Any]]:
        groups = httpx.get(f"{self.url}/api/v1/rules", timeout=PATIENCE_S).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def has_evaluated(self) -> bool:
        rules = self.rules()
        recorded = all(self.query(rule["name"]) for rule in rules if rule["type"] == "recording")
        return recorded and all(rule["health"] != "unknown" for rule in rules)

    def check_rules(self) -> None:
        """Raise Failed if a rule cannot be evaluated, or an alert is active although nothing is wrong."""
        for rule in self.rules():
            if rule["health"] != "ok":
                raise Failed(f"{rule['name']}: {rule.get('lastError')}")
            if rule["type"] == "alerting" and rule["state"] != "inactive" and rule["name"] not in OF_THIS_MACHINE:
                raise Failed(f"{rule['name']} is {rule['state']}: {rule['alerts']}")

    def check_queries(self) -> int:
        """Send the dashboard's queries, and return how many. Raises Failed."""
        without_series = {"ALERTS", *(name for name, labels in exported_samples().items() if not labels)}
        sent = list(queries())
        for query in sent:
            may_be_empty = {selector.metric for selector in selectors(query.expression)} & without_series
            if not self.query(for_prometheus(query.expression)) and not may_be_empty:
                raise Failed(f"{query.where} finds nothing: {query.expression}")
        return len(sent)
