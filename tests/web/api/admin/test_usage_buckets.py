"""Bucket and page arithmetic: buckets tile any range, and a cursor continues where its page ended."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.web.api.admin.organization_usage import start_of
from quipu.web.api.admin.usage_buckets import WIDTHS, Range
from quipu.web.request.errors import APIError

WIDTH_NAMES = st.sampled_from(sorted(WIDTHS))


@given(WIDTH_NAMES, st.integers(0, 10_000_000), st.integers(0, 400), st.integers(0, 86_399), st.integers(1, 31))
def test_pages_tile_the_range(name: str, since: int, num_widths: int, rest: int, limit: int) -> None:
    """Each moment is in exactly one bucket; inner boundaries are UTC boundaries; only the last page may be short."""
    width = WIDTHS[name]
    until = since + num_widths * width.width_s + rest % width.width_s
    pages = [Range(width, since, until, limit).lay_out()]
    while (cursor := pages[-1].cursor) is not None:
        pages.append(Range(width, start_of(cursor, width, since), until, limit).lay_out())
    buckets = [bucket for page in pages for bucket in page.buckets]
    assert all(len(page.buckets) == limit for page in pages[:-1])
    assert (buckets == []) == (since == until)
    if buckets:
        assert (buckets[0].start, buckets[-1].end) == (since, until)
    for before, after in itertools.pairwise(buckets):
        assert before.end == after.start and before.end % width.width_s == 0
    assert all(0 < bucket.end - bucket.start <= width.width_s for bucket in buckets)


def test_empty_range() -> None:
    """A range that ends before it begins has no buckets and no next page."""
    page = Range(WIDTHS["1h"], 7200, 3600, 5).lay_out()
    assert (page.buckets, page.next_start, page.cursor) == ((), None, None)


def test_boundaries_before_epoch_and_of_fractions() -> None:
    """A boundary is at or before its time, never after it."""
    width = WIDTHS["1h"]
    assert [width.border(seconds) for seconds in (3599.999, 3600.0, 3600.001, -0.5)] == [0, 3600, 3600, -3600]
    assert width.next_border(3600.0) == 7200


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "page_",
        "page_!!!",
        "nonsense",
        "page_bm9uc2Vuc2U",
        "page_MTIz",
        "page_MA",
        "page_LTM2MDA",
        "page_" + "M" * 999,
    ],
)
def test_invalid_cursor(cursor: str) -> None:
    """Anything that is not a `next_page` value is refused by name."""
    with pytest.raises(APIError) as get_error:
        start_of(cursor, WIDTHS["1h"], 0)
    assert (get_error.value.status, get_error.value.param) == (400, "page")


def test_cursor_of_another_query() -> None:
    """A cursor before the range, or on no bucket boundary, belongs to another query."""
    cursor = Range(WIDTHS["1m"], 0, 7200, 1).lay_out().cursor
    assert cursor is not None and start_of(cursor, WIDTHS["1m"], 0) == 60
    for width, since in ((WIDTHS["1h"], 0), (WIDTHS["1m"], 60), (WIDTHS["1m"], 3600)):
        with pytest.raises(APIError):
            start_of(cursor, width, since)
