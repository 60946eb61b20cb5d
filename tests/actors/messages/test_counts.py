"""Counts carry their certainty: kinds do not mix, neither for the type checker nor at run time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mypy import api

from quipu.actors.messages.counts import UNKNOWN, Count, Estimate, Known, Unknown, billable, kind_of, shown, total
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord

ROOT = Path(__file__).resolve().parents[3]

NAMES = {"known": Known(3), "estimate": Estimate(5), "unknown": UNKNOWN, "n": 7, "sum": sum}
MIXED = [
    "known + estimate",
    "estimate + known",
    "known + unknown",
    "known - known",
    "known - estimate",
    "estimate - known",
    "estimate - estimate",
    "unknown + unknown",
    "known + n",
    "n + known",
    "estimate + n",
    "sum([known, known])",
    "sum([known, estimate])",
]
"""Expressions that mix kinds, or a kind and a number."""
ONLY_TYPES = [
    "takes_known(estimate)",
    "takes_known(unknown)",
    "takes_known(n)",
    "takes_known(count)",
    "count + count",
    "count.n",
    "UsageRecord(request_id='r', outcome=Outcome.FINISHED, cached=n)",
]
"""Also wrong for the type checker, whatever happens at run time."""
FINE = [
    "known + known",
    "estimate + estimate",
    "takes_known(known + known)",
    "total([known, estimate, unknown])",
    "UsageRecord(request_id='r', outcome=Outcome.FINISHED, cached=estimate)",
]

HEAD = """
from quipu.actors.messages.counts import Count, Estimate, Known, Unknown, total
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord

def takes_known(known: Known) -> None: ...

def snippets(known: Known, estimate: Estimate, unknown: Unknown, n: int, count: Count) -> None:
"""


def test_mixing_kinds_is_a_type_error(tmp_path: Path) -> None:
    """Each marked line is wrong for mypy with the product's settings, and each other line is right.

    With the cache of `make types`: without one, mypy reads the standard library's types for ten seconds.
    """
    lines = [*MIXED, *ONLY_TYPES, *FINE]
    snippet = tmp_path / "snippet.py"
    snippet.write_text(HEAD + "".join(f"    {line}\n" for line in lines))
    first = HEAD.count("\n") + 1
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    output, errors, _ = api.run([*options, "--no-error-summary", str(snippet)])
    assert errors == ""
    at = [int(number) - first for number in re.findall(r"snippet\.py:(\d+): error", output)]
    assert {lines[index] for index in at} == {*MIXED, *ONLY_TYPES}, output


@pytest.mark.parametrize("expression", MIXED)
def test_mixing_kinds_is_an_error_at_run_time(expression: str) -> None:
    """A mix that gets past the type checker raises TypeError."""
    with pytest.raises(TypeError):
        eval(expression, NAMES)


def test_same_kinds_add_up() -> None:
    """Counts of one kind can be added."""
    assert Known(3) + Known(4) == Known(7)
    assert Estimate(3) + Estimate(4) == Estimate(7)
    assert Known(3) != Estimate(3)  # type: ignore[comparison-overlap]  # checked at run time here


RANK = {Known: 0, Estimate: 1, Unknown: 2}
COUNTS = st.one_of(st.builds(Known, st.integers(0, 99)), st.builds(Estimate, st.integers(0, 99)), st.just(UNKNOWN))


@given(st.lists(COUNTS))
def test_total_is_as_uncertain_as_its_worst_part(counts: list[Count]) -> None:
    """The total is known only if all parts are, and unknown with one unknown part or without parts; the number is the
    sum."""
    worst = max((RANK[type(count)] for count in counts), default=RANK[Unknown])
    result = total(counts)
    assert RANK[type(result)] == worst
    if not isinstance(result, Unknown):
        assert result.n == sum(count.n for count in counts if not isinstance(count, Unknown))


def test_shown_and_billable() -> None:
    """A client is shown counts and estimates, 0 as 0; only a count is billed."""
    counts: list[Count] = [Known(0), Known(3), Estimate(3), UNKNOWN]
    assert [shown(count) for count in counts] == [0, 3, 3, None]
    assert [billable(count) for count in counts] == [0, 3, None, None]
    assert [kind_of(count) for count in counts] == ["known", "known", "estimate", "unknown"]


def test_counts_of_a_record_default_to_unknown() -> None:
    """A count that was never set is unknown, which is not 0."""
    record = UsageRecord(request_id="r", outcome=Outcome.REJECTED)
    assert record.prompt == record.cached == record.cache_write == UNKNOWN
    assert record.prompt_tokens is record.cached_tokens is record.cache_write_tokens is None
