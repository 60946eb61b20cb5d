"""Draws panels of the dashboard from what Prometheus answers for their queries: an SVG without scripts.

It is no copy of Grafana: lines, one scale from 0 for each panel, the last values in the legend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import attrs

from tests.deploy.dashboard import WIDTH

CELL_WIDTH, CELL_HEIGHT = 50, 26
COLORS = ("#3274d9", "#e0752d", "#629e51", "#a352cc", "#e24d42", "#0aa2a2")
Panel = Mapping[str, Any]
"""As the dashboard has it."""
_TEXT = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif"'


@attrs.frozen
class Series:
    """A line: its name, and its values by Unix seconds."""

    name: str
    points: tuple[tuple[float, float], ...]


def named(legend: str, labels: Mapping[str, str]) -> str:
    """Return a series' name, as its panel says."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend or "").strip()


def shown_value(value: float, unit: str) -> str:
    """Return a value with its unit, as people read it."""
    match unit:
        case "percentunit":
            return f"{100 * value:.0f} %"
        case "s" if value < 1:
            return f"{1000 * value:.3g} ms"
        case "s":
            return f"{value:.3g} s"
        case "reqps" | "ops":
            return f"{value:.3g}/s"
        case _:
            return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def draw_dashboard(panels: Iterable[Panel], series_of: Callable[[Panel], Sequence[Series]]) -> str:
    """Return the picture of panels, each at its place in the grid."""
    parts, height = [], 0
    for panel in panels:
        place = panel["gridPos"]
        x, y = place["x"] * CELL_WIDTH, place["y"] * CELL_HEIGHT
        size = (place["w"] * CELL_WIDTH - 6, place["h"] * CELL_HEIGHT - 6)
        height = max(height, y + size[1] + 6)
        parts.append(f'<g transform="translate({x + 3},{y + 3})">')
        if panel["type"] == "row":
            parts.append(_text(2, 15, panel["title"], size=14, weight="bold"))
        else:
            parts.append(f'<rect width="{size[0]}" height="{size[1]}" rx="3" fill="#fff" stroke="#d8dce2"/>')
            parts.append(_text(8, 17, panel["title"], weight="bold"))
            unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
            draw = _stat if panel["type"] == "stat" else _lines
            parts += draw(series_of(panel), unit, *size)
        parts.append("</g>")
    width = WIDTH * CELL_WIDTH
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#f4f5f7"/>', *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, size: int = 11, weight: str = "normal", more: str = "") -> str:
    style = f'{_TEXT} font-size="{size}" font-weight="{weight}" fill="#24292e"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style} {more}>{escape(text)}</text>'


def _stat(series: Sequence[Series], unit: str, width: int, height: int) -> list[str]:
    said = shown_value(series[0].points[-1][1], unit) if series else "no data"
    return [_text(width / 2, height / 2 + 18, said, size=24, weight="bold", more='text-anchor="middle"')]


def _lines(series: Sequence[Series], unit: str, width: int, height: int) -> list[str]:
    legend, rows = _legend(series, unit, width - 68)
    left, right, top, bottom = 58, width - 10, 30, height - 20 - 14 * rows
    if not series:
        return [_text(width / 2, height / 2, "no data", more='text-anchor="middle"')]
    times = [at for one in series for at, _ in one.points]
    begin, span = min(times), (max(times) - min(times)) or 1.0
    most = max(value for one in series for _, value in one.points) or 1.0
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * (bottom - top)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#e4e7eb"/>')
        parts.append(_text(left - 5, y + 4, shown_value(share * most, unit), size=10, more='text-anchor="end"'))
    for number, one in enumerate(series):
        at = [
            f"{left + (time - begin) / span * (right - left):.1f},{bottom - value / most * (bottom - top):.1f}"
            for time, value in one.points
        ]
        style = f'fill="none" stroke="{COLORS[number % len(COLORS)]}" stroke-width="1.6"'
        parts.append(f'<polyline points="{" ".join(at)}" {style}/>')
    return [*parts, f'<g transform="translate({left},{bottom + 14})">', *legend, "</g>"]


def _legend(series: Sequence[Series], unit: str, width: int) -> tuple[list[str], int]:
    """Return names and last values in as many rows as they need, and how many these are."""
    parts, x, row = [], 0, 0
    for number, one in enumerate(series):
        said = f"{one.name} {shown_value(one.points[-1][1], unit)}".strip()
        size = 6 * len(said) + 24
        if x and x + size > width:
            x, row = 0, row + 1
        y = 14 * row
        parts.append(f'<rect x="{x}" y="{y}" width="8" height="8" fill="{COLORS[number % len(COLORS)]}"/>')
        parts.append(_text(x + 12, y + 8, said, size=10))
        x += size
    return parts, row + 1
