"""Line graphs as SVG, for `bench/graphs.py`: logarithmic axes, a label at the end of each line, light and dark colors.

What must always hold: the same numbers give the same bytes, so that a picture changes only if its numbers do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

import attrs

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 92, 40, 44
COLORS = ("#4063d8", "#389826", "#cb3c33", "#9558b2", "#b8860b", "#0e7c86")
LABEL_STEP = 14
"""Pixels between the labels of two lines, at least."""


@attrs.frozen
class Line:
    """A name, and points from left to right; both coordinates are positive."""

    name: str
    points: tuple[tuple[float, float], ...]


def line_graph(title: str, axis: str, lines: Sequence[Line]) -> str:
    """Return the graph. Raises ValueError if there is no point."""
    points = [point for line in lines for point in line.points]
    if not points:
        raise ValueError("a graph needs points")
    left, right = (pick(x for x, _ in points) for pick in (min, max))
    low, high = 0.8 * min(y for _, y in points), 1.2 * max(y for _, y in points)

    def across(x: float) -> float:
        share = 0.5 if left == right else math.log(x / left) / math.log(right / left)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def down(y: float) -> float:
        return round(HEIGHT - BOTTOM - math.log(y / low) / math.log(high / low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"',
        f' aria-label="{escape(title)}">',
        "<style>text{font:12px system-ui,sans-serif;fill:#333}.grid{stroke:#8884}.line{fill:none;stroke-width:2}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}}</style>",
        f'<text x="{LEFT}" y="20" style="font-size:14px">{escape(title)}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(axis)}</text>',
    ]
    for y in ticks(low, high):
        parts.append(f'<path class="grid" d="M{LEFT} {down(y)}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{y:,g}</text>')
    parts += [
        f'<text x="{across(x)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:,g}</text>'
        for x in sorted({x for x, _ in points})
    ]
    ends = spread([down(line.points[-1][1]) for line in lines], HEIGHT - BOTTOM)
    for line, end, color in zip(lines, ends, [COLORS[i % len(COLORS)] for i in range(len(lines))], strict=True):
        path = "L".join(f"{across(x)} {down(y)}" for x, y in line.points)
        parts.append(f'<path class="line" stroke="{color}" d="M{path}"/>')
        parts += [f'<circle cx="{across(x)}" cy="{down(y)}" r="3" fill="{color}"/>' for x, y in line.points]
        # `style`, because the rule for all text would override an attribute
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{end + 4:.1f}" style="fill:{color}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two positive ones: 1, 2 and 5 times powers of ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    round_ones = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
    return [number for number in round_ones if low <= number <= high]


def spread(places: Sequence[float], lowest: float) -> list[float]:
    """Move labels down so that none covers another, and up where they would be below `lowest`; their order stays."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    for before, index in pairwise(order):
        moved[index] = max(moved[index], moved[before] + LABEL_STEP)
    limit = lowest
    for index in reversed(order):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - LABEL_STEP
    return moved
