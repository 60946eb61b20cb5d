"""The alerts of `deploy/prometheus/`: they use what servers export, and a page says what to do at each.

That they fire when they should is tested by promtool with the cases of `alert_cases.py` (`python -m tests.deploy`).
"""

from __future__ import annotations

import re

import pytest
import yaml

from tests.deploy.alert_cases import CASES
from tests.deploy.exported import wrong_names
from tests.deploy.promql import grouping_labels, selectors
from tests.deploy.rules import ROOT, RULES, Rule, read_rules, recorded_names

PAGE = ROOT / "docs" / "operate" / "alerts.md"
ALERTS = [rule for rule in read_rules() if rule.is_alert]


@pytest.mark.parametrize("rule", read_rules(), ids=lambda rule: rule.name)
def test_expression_uses_exported_metrics(rule: Rule) -> None:
    """Every metric, label and value of a label in a rule is one that a server exports, or another rule records."""
    assert list(wrong_names(rule.expression, recorded_names())) == []


def test_made_up_names_are_found() -> None:
    """A metric, a label or a value that no server exports is reported."""
    wrong = (
        'sum by (made_up) (rate(quipu:hits_total[5m])) / quipu:kv_blocks{state="lost"} > quipu:kv_blocks{stat="used"}'
    )
    assert list(wrong_names(wrong, set())) == [
        "made_up", "quipu:hits_total", "quipu:kv_blocks{state=lost}", "quipu:kv_blocks{stat=used}",
    ]  # fmt: skip
    assert [selector.metric for selector in selectors('sum(up{a="b"} offset 1h) and on (x) y:z[5m]')] == ["up", "y:z"]
    assert grouping_labels("sum by (a, b) (c) + on(d) e") == {"a", "b", "d"}


def test_page_has_a_section_for_each_alert() -> None:
    """The page has one section for each alert, in the order of the rules, and each says something."""
    sections = re.findall(r"^### (Quipu\w+)\n\n(.*?)(?=\n#|\Z)", PAGE.read_text("utf-8"), flags=re.M | re.S)
    assert sorted(name for name, _ in sections) == sorted(rule.name for rule in ALERTS)
    assert all(len(text) > 100 for _, text in sections)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule.name)
def test_alert_names_its_severity_and_server(rule: Rule) -> None:
    """An alert says how urgent it is, which server it is about, and where to read what to do."""
    assert rule.severity in ("page", "ticket")
    assert "{{ $labels.instance }}" in rule.summary
    assert rule.runbook == f"{PAGE.relative_to(ROOT)}#{rule.name.lower()}"


def test_every_alert_is_provoked() -> None:
    """The cases for promtool have each alert fire; in the first, nothing fires although every series is there."""
    assert {firing.alert for case in CASES for some in case.firing.values() for firing in some} == {
        rule.name for rule in ALERTS
    }
    healthy = CASES[0]
    assert not any(healthy.firing.values())
    used = {selector.metric for rule in read_rules() for selector in selectors(rule.expression)} - recorded_names()
    alerting = {selector.metric for rule in ALERTS for selector in selectors(rule.expression)} - recorded_names()
    assert alerting <= {series.name for series in healthy.series} <= used


def test_configuration_has_the_rules() -> None:
    """Prometheus' configuration loads the rules from beside it, and its job has the name that they expect."""
    configuration = yaml.safe_load(RULES.with_name("prometheus.yml").read_text())
    assert configuration["rule_files"] == [RULES.name]
    assert [job["job_name"] for job in configuration["scrape_configs"]] == ["quipu"]
