"""Random questions about usage, made of the parameters of each report: most of them valid, some not.

Used like `bodies.py`, for endpoints that are asked with GET. A new parameter of a report needs a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from bench.body_parts import mostly

TABLE = "/ui/usage"
KEY_NAMES = "/ui/key-names"
OPENAI = "/v1/organization/usage/completions"
EMBEDDINGS = "/v1/organization/usage/embeddings"
ANTHROPIC = "/v1/organizations/usage_report/messages"
RECORD, RECEIPT = "/v1/usage/{}", "/v1/usage/{}/receipt"
EXPLAIN = "/v1/cache/explain/{}"
_JUNK = st.text(max_size=8) | st.sampled_from(["-1", "0", "1e9", "x" * 300, "\0", "=1", "null"])
_SECONDS = mostly(st.integers(1_699_900_000, 1_704_000_000), st.integers(-(2**70), 2**70) | _JUNK)
_DATE = mostly(st.datetimes().map(lambda when: f"{when.isoformat()}Z"), _JUNK)
_NAMES = st.lists(st.sampled_from(["demo", "tenant-1", "key-1"]) | _JUNK, max_size=3)
_WIDTH = mostly(st.sampled_from(["1m", "1h", "1d"]), _JUNK)
_COMMON: Mapping[str, Strategy[Any]] = {
    "bucket_width": _WIDTH,
    "limit": mostly(st.integers(1, 31), st.integers(-1, 2000) | _JUNK),
    "page": mostly(st.sampled_from(["page_MTcwMDAwNjQwMA", "page_MTcwMDAwMDAwMA"]), _JUNK),
    "retries": mostly(st.sampled_from(["count", "collapse"]), _JUNK),
    "api_key_ids[]": _NAMES,
    "models[]": _NAMES,
}


def _among(*names: str) -> Strategy[Any]:
    return st.lists(mostly(st.sampled_from(names), _JUNK), max_size=3)


REPORTS: Mapping[str, Mapping[str, Strategy[Any]]] = {
    TABLE: {
        "since": _SECONDS,
        "until": _SECONDS,
        "bucket": _WIDTH,
        "by": _among("model", "kind", "api_key", "tenant"),
        "tenant": _NAMES,
        "format": mostly(st.sampled_from(["json", "csv"]), _JUNK),
    },
    KEY_NAMES: {"id": _NAMES},
    OPENAI: {
        **_COMMON,
        "start_time": _SECONDS,
        "end_time": _SECONDS,
        "group_by": _among("project_id", "api_key_id", "model", "batch", "user_id"),
        "project_ids": _NAMES,
        "batch": mostly(st.sampled_from(["true", "false"]), _JUNK),
        "user_ids": mostly(st.just([]), _NAMES),
    },
    EMBEDDINGS: {
        **_COMMON,
        "start_time": _SECONDS,
        "end_time": _SECONDS,
        "group_by": _among("project_id", "api_key_id", "model", "user_id"),
        "project_ids": _NAMES,
    },
    ANTHROPIC: {
        **_COMMON,
        "starting_at": _DATE,
        "ending_at": _DATE,
        "group_by[]": _among("workspace_id", "api_key_id", "model", "service_tier", "speed"),
        "workspace_ids[]": _NAMES,
        "service_tiers[]": _among("standard", "batch"),
        "speeds[]": _among("standard", "fast"),
        "inference_geos[]": _among("not_available", "us"),
        "account_ids[]": mostly(st.just([]), _NAMES),
    },
    RECORD: {},
    RECEIPT: {},
    EXPLAIN: {},
}
_REQUIRED = {OPENAI: "start_time", EMBEDDINGS: "start_time", ANTHROPIC: "starting_at"}


@st.composite
def paths(draw: st.DrawFn, report: str) -> str:
    """Draw the path and query of one request."""
    if not REPORTS[report]:
        numbers = st.integers(0, 9) | st.integers(0, 2**96 - 1)  # the first ones are likely to exist
        name = draw(mostly(numbers.map(lambda number: f"req-{number:024x}"), st.text(min_size=1, max_size=8)))
        return report.format(quote(name, safe=""))
    parameters = REPORTS[report]
    names = set(draw(st.lists(st.sampled_from(sorted(parameters)), max_size=5)))
    if report in _REQUIRED and draw(st.integers(0, 9)):
        names.add(_REQUIRED[report])
    query = {name: draw(parameters[name]) for name in sorted(names)}
    return f"{report}?{urlencode(query, doseq=True, errors='replace')}"
