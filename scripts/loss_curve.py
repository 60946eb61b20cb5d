"""Draw a training run of the demo model as an SVG: the loss, and the share of right answers, over the tokens seen.

python scripts/loss_curve.py RUN/log.jsonl docs/internals/demo-model.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 760, 300, 46
COLOURS = ("#1b6ca8", "#c0392b", "#27803b", "#8e5ea2", "#b8860b", "#555555")
SHOWN = ("recall_40", "tool", "json", "arithmetic")


def main(log: Path, picture: Path) -> None:
    """Draw the run whose `log.jsonl` is `log` into `picture`."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [(line["tokens"] / 1e6, line["loss"]) for line in lines if "loss" in line]
    shares = {name: [(line["tokens"] / 1e6, line[name]) for line in lines if name in line] for name in SHOWN}
    most_tokens = losses[-1][0]
    ceiling = 3.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {2 * HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{2 * HEIGHT}" fill="white"/>',
        _axes(0, "loss of what the model has to write, nats a token", most_tokens, ceiling),
        _line(0, [(x, min(y, ceiling)) for x, y in losses], most_tokens, ceiling, COLOURS[0]),
        _axes(HEIGHT, "share of right answers to held-out questions", most_tokens, 1.0),
    ]
    for colour, (name, points) in zip(COLOURS, shares.items(), strict=False):
        parts.append(_line(HEIGHT, points, most_tokens, 1.0, colour))
        place = MARGIN + 12 + 110 * SHOWN.index(name)
        parts.append(f'<text x="{place}" y="{HEIGHT + 26}" fill="{colour}">{name}</text>')
    picture.write_text("\n".join([*parts, "</svg>\n"]))


def _axes(top: int, title: str, most_x: float, most_y: float) -> str:
    left, right, bottom = MARGIN, WIDTH - MARGIN, top + HEIGHT - MARGIN
    parts = [f'<text x="{left}" y="{top + 14}" font-weight="bold">{title}</text>']
    for step in range(5):
        x = left + (right - left) * step / 4
        y = bottom - (bottom - top - MARGIN) * step / 4
        parts += [
            f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{most_x * step / 4:.0f}M tokens</text>',
            f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{most_y * step / 4:.2g}</text>',
            f'<path d="M{left} {y:.1f}H{right}" stroke="#dddddd" fill="none"/>',
        ]
    return "".join(parts)


def _line(top: int, points: list[tuple[float, float]], most_x: float, most_y: float, colour: str) -> str:
    left, right, bottom = MARGIN, WIDTH - MARGIN, top + HEIGHT - MARGIN
    places = " ".join(
        f"{left + (right - left) * x / most_x:.1f},{bottom - (bottom - top - MARGIN) * y / most_y:.1f}"
        for x, y in points
    )
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
