"""The dashboard of `deploy/grafana/`, as this folder's checks read it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "quipu.json"
PICTURE = ROOT / "docs" / "pictures" / "dashboard.svg"
"""Of the panels in the first rows; `python -m tests.deploy.pictures` draws it."""
WIDTH = 24
"""Of Grafana's grid."""
NUM_PICTURED_ROWS = 3


@attrs.frozen
class Query:
    where: str
    expression: str


def read_dashboard() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return dashboard


def pictured_panels() -> list[dict[str, Any]]:
    """Return the panels that are in the picture."""
    panels: list[dict[str, Any]] = read_dashboard()["panels"]
    rows = [panel["gridPos"]["y"] for panel in panels if panel["type"] == "row"]
    return [panel for panel in panels if panel["gridPos"]["y"] < rows[NUM_PICTURED_ROWS]]


def queries() -> Iterator[Query]:
    """Yield the queries of all panels, variables and annotations."""
    dashboard = read_dashboard()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield Query(f"panel {panel['title']}", target["expr"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert found is not None, variable
            yield Query(f"variable {variable['name']}", f"group by ({found[2]}) ({found[1]})")
    for annotation in dashboard["annotations"]["list"]:
        yield Query(f"annotation {annotation['name']}", annotation["expr"])


def for_prometheus(expression: str) -> str:
    """Return an expression as Grafana sends it when all servers and models are chosen."""
    return expression.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$model", ".*")
