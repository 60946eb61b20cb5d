"""The rules of `deploy/prometheus/`, as this folder's checks read them."""

from __future__ import annotations

from pathlib import Path

import attrs
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "quipu-rules.yml"


@attrs.frozen
class Rule:
    name: str
    expression: str
    is_alert: bool
    severity: str = ""
    summary: str = ""
    runbook: str = ""


def read_rules() -> list[Rule]:
    """Return all rules in their order."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [
        Rule(
            rule["alert"] if "alert" in rule else rule["record"],
            rule["expr"],
            "alert" in rule,
            rule.get("labels", {}).get("severity", ""),
            rule.get("annotations", {}).get("summary", ""),
            rule.get("annotations", {}).get("runbook", ""),
        )
        for group in groups
        for rule in group["rules"]
    ]


def recorded_names() -> set[str]:
    """Return the names of the series that recording rules make."""
    return {rule.name for rule in read_rules() if not rule.is_alert}
