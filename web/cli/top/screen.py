"""The screen of `quipu top`, made with rich: it fits the terminal, whose size may change at any time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .figures import Figures
from .server_reader import number, word
from .view import COUNTS, View, outage_words, rows_of, used_share

_ENGINES: Final = ("num_running", "num_waiting", "blocks_used", "blocks_total", "deaths")
_UPSTREAMS: Final = ("num_running", "failures")
_STYLES: Final = {"ready": "green", "starting": "yellow", "draining": "yellow", "disabled": "yellow"}
_BAR_WIDTH: Final = 40
_WORD_WIDTH: Final = 32


def make_screen(view: View, height: int) -> RenderableType:
    """Return what is drawn on a terminal of this many lines, the most important first."""
    return Group(*_parts(view, height))


def _parts(view: View, height: int) -> Iterator[RenderableType]:
    yield _title(view)
    if view.outage is not None:
        yield Text(outage_words(view.outage), "bold red", no_wrap=True, overflow="ellipsis")
    reading = view.reading
    if reading is None:
        return
    for refusal in (reading.detail, *reading.refusals):
        if refusal:
            yield Text(refusal, "yellow", no_wrap=True, overflow="ellipsis")
    yield Text("")
    numbers = Table.grid(padding=(0, 2))
    numbers.add_column(style="bold", no_wrap=True, min_width=10)
    numbers.add_column(no_wrap=True, overflow="ellipsis")
    for name, text in rows_of(view):
        numbers.add_row(name, text)
    yield numbers
    if view.figures is not None:
        yield _bar(view.figures)
    room = max(1, (height - 16) // 2)
    if reading.engines:
        yield from _table(
            "engine",
            ("role", "state"),
            _ENGINES,
            [({**row, "engine": row.get("id")}) for row in reading.engines[:room]],
        )
    if reading.upstreams:
        yield from _table("url", ("state",), _UPSTREAMS, reading.upstreams[:room])
    if reading.tenants:
        title = f"tenant, in the last {reading.tenants_window_s / 60:,.0f} min"
        rows = sorted(reading.tenants, key=lambda row: -number(row.get("prompt_tokens")))
        yield from _table("tenant", ("model",), COUNTS, [_with_rate(row) for row in rows[:room]], title)


def _title(view: View) -> Text:
    state = view.reading.state if view.reading is not None else "unknown"
    parts: list[str | tuple[str, str]] = [
        "quipu top",
        (f"  {view.base_url}  ", "dim"),
        (state, _STYLES.get(state, "red")),
        f"  {view.time}",
    ]
    hint = (f"  every {view.interval_s:g} s, q quits", "dim")
    return Text.assemble(*parts, hint, no_wrap=True, overflow="ellipsis")


def _bar(figures: Figures) -> Text:
    """Return the pool of KV blocks: in use, kept for reuse, free."""
    total = sum(figures.blocks.values())
    used = round(_BAR_WIDTH * used_share(figures))
    cached = min(_BAR_WIDTH - used, round(_BAR_WIDTH * figures.blocks["cached"] / total)) if total else 0
    free = _BAR_WIDTH - used - cached
    return Text.assemble(
        ("#" * used, "green"), ("=" * cached, "cyan"), ("." * free, "dim"), no_wrap=True, overflow="ellipsis"
    )


def _table(
    name: str, words: Sequence[str], numbers: Sequence[str], rows: Sequence[dict[str, Any]], title: str = ""
) -> Iterator[RenderableType]:
    yield Text("")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (name, *words):
        table.add_column(
            title if title and column == name else column, no_wrap=True, overflow="ellipsis", max_width=_WORD_WIDTH
        )
    shown = [*numbers, *(["hit rate"] if rows and "hit rate" in rows[0] else [])]
    for column in shown:
        table.add_column(column.removeprefix("num_").replace("_", " "), justify="right", no_wrap=True)
    for row in rows:
        cells = [_cell(row.get(column)) for column in (name, *words, *shown)]
        table.add_row(*(Text(cell) for cell in cells))
    yield table


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return word(value) if isinstance(value, str) else f"{number(value):,.0f}"


def _with_rate(row: dict[str, Any]) -> dict[str, Any]:
    """Add a tenant's hit rate, from its counts."""
    prompt, cached = number(row.get("prompt_tokens")), number(row.get("cached_tokens"))
    return {**row, "hit rate": f"{cached / prompt:.1%}" if prompt else "-"}
