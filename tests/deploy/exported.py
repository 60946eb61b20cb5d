"""The samples that a server exports, with their labels, for the checks of rules and dashboards.

They are read from `tests/wire_names.json`, which `tests/test_wire_names.py` compares with the `/metrics` of a real
server; `python -m tests.deploy` scrapes another one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.deploy.promql import grouping_labels, selectors

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "wire_names.json"
PROMETHEUS_LABELS = frozenset({"job", "instance"})
SOMETIMES = frozenset({"adapter", "engine", "quantile"})
"""Labels of series that the list's server does not have: of several engines, of adapters, of evicted blocks."""


@cache
def exported_samples() -> dict[str, set[str]]:
    """Return the labels of each sample that a server exports: their names, and `name=value` of known values."""
    samples: dict[str, set[str]] = {}
    for family, (kind, *rest) in json.loads(LIST.read_text())["metrics"].items():
        names = [name for name in rest if name.startswith(family)]
        labels = {label for name in rest if name not in names for label in (name, name.partition("=")[0])}
        for name in names or [f"{family}_total" if kind == "counter" else family]:
            samples[name] = labels
    return samples


def wrong_names(expression: str, recorded: set[str]) -> Iterator[str]:
    """Yield what an expression names that no server exports. `recorded`: names that recording rules give."""
    samples = exported_samples()
    labels = set().union(*samples.values(), PROMETHEUS_LABELS, SOMETIMES)
    yield from sorted(grouping_labels(expression) - labels)
    for selector in selectors(expression):
        if selector.metric in recorded or selector.metric == "up":
            continue
        if selector.metric not in samples:
            yield selector.metric
            continue
        known = samples[selector.metric]
        for matcher in selector.matchers:
            if not known or matcher.label in PROMETHEUS_LABELS | SOMETIMES or matcher.value.startswith("$"):
                continue
            wanted = f"{matcher.label}={matcher.value}" if matcher.operator in ("=", "!=") else matcher.label
            has_values = any(name.startswith(f"{matcher.label}=") for name in known)
            if (wanted if has_values else matcher.label) not in known:
                yield f"{selector.metric}{{{wanted}}}"
