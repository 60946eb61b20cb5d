"""The dashboard of `deploy/grafana/`: it asks for what servers export, and no two panels cover each other.

That Prometheus accepts its queries, and Grafana's schema its fields, is checked by `python -m tests.deploy`.
"""

from __future__ import annotations

import re
from collections import Counter
from html import escape

import pytest

from tests.deploy.dashboard import PICTURE, WIDTH, Query, pictured_panels, queries, read_dashboard
from tests.deploy.exported import exported_samples, wrong_names
from tests.deploy.panel_drawing import Series, draw_dashboard, named
from tests.deploy.promql import selectors

QUERIES = list(queries())
PROMETHEUS_OWN = {"ALERTS"}


@pytest.mark.parametrize("where", sorted({query.where for query in QUERIES}))
def test_panel_asks_for_exported_metrics(where: str) -> None:
    """Every metric, label and value of a label in a query is one that a server exports."""
    for query in QUERIES:
        if query.where == where:
            assert list(wrong_names(query.expression, PROMETHEUS_OWN)) == []


def test_queries_obey_the_variables() -> None:
    """Every selector is restricted to the chosen servers, and to the chosen models where a sample has a model."""
    samples = exported_samples()

    def wanted(query: Query, metric: str) -> set[str]:
        if query.where.startswith("variable"):
            return {"job"}
        has_model = "model_name" in samples.get(
            metric, {"model_name"} if metric == "quipu:adapter_requests_total" else ()
        )
        return {"job", "instance"} | ({"model_name"} if has_model else set())

    for query in QUERIES:
        for selector in selectors(query.expression):
            assert wanted(query, selector.metric) <= {matcher.label for matcher in selector.matchers}, query


def test_every_metric_has_a_panel() -> None:
    """What a server exports is on the dashboard, except for texts, times of creation and sums of histograms."""
    shown = {selector.metric for query in QUERIES for selector in selectors(query.expression)}
    families = {
        name.removesuffix("_bucket")
        for name in exported_samples()
        if not name.endswith(("_created", "_sum", "_count")) and not name.endswith(("_info", "engine_role"))
    }
    missing = families - {name.removesuffix("_bucket") for name in shown}
    assert missing == {
        "quipu:prompt_tokens_total",  # as prefix_cache_queries, which leaves out what nobody knows
        "quipu:request_cached_tokens",  # as request_cache_hit_ratio
        "quipu:kv_tier_corrupt_total",  # among those not loaded, by reason
        "quipu:spec_decode_num_drafts_total",
        "quipu:spec_decode_num_accepted_tokens_per_pos_total",
        "quipu:data_dir_size_bytes",
        "quipu:response_store_background_responses",
    }


def test_layout() -> None:
    """Ids are unique, and panels lie within the grid's width and cover no other."""
    panels = read_dashboard()["panels"]
    assert max(Counter(panel["id"] for panel in panels).values()) == 1
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        cells = {(place["x"] + right, place["y"] + down) for right in range(place["w"]) for down in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_picture_has_the_panels_of_today() -> None:
    """The picture in the documents has each panel of the first rows (`python -m tests.deploy.pictures` draws it)."""
    picture = PICTURE.read_text("utf-8")
    assert [panel["title"] for panel in pictured_panels() if f">{escape(panel['title'])}</text>" not in picture] == []


def test_panels_are_drawn() -> None:
    """A panel's largest value reaches its top, 0 its bottom, and the legend has the last values; no data says so."""
    place = {"gridPos": {"x": 0, "y": 0, "w": 8, "h": 8}, "fieldConfig": {"defaults": {"unit": "s"}}}
    panels = [{**place, "type": "timeseries", "title": "Waits"}, {**place, "type": "stat", "title": "Now"}]
    drawn = {
        "Waits": [Series("p50", ((10.0, 0.0), (11.0, 0.5))), Series("p99", ((10.0, 1.0), (11.0, 2.0)))],
        "Now": [],
    }
    picture = draw_dashboard(panels, lambda panel: drawn[panel["title"]])
    first, second = re.findall(r'points="([^"]+)"', picture)
    assert first == "58.0,168.0 384.0,133.5" and second == "58.0,99.0 384.0,30.0"
    assert ">p50 500 ms</text>" in picture and ">p99 2 s</text>" in picture and picture.count(">no data</text>") == 1


def test_series_are_named_by_their_labels() -> None:
    """A legend's labels are replaced by those of the series."""
    assert named("{{tier}} stored", {"tier": "host"}) == "host stored"
