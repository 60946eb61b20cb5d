"""The graphs of `python -m bench.graphs`: valid SVG that shows every line, and labels that do not cover each other."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from bench.line_graph import LABEL_STEP, Line, line_graph, spread, ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_every_line_is_drawn_and_named() -> None:
    """A graph has a path and a name for each line, a circle for each point, and names are text."""
    lines = [Line("<b>", ((1, 10.0), (8, 80.0))), Line("int8", ((1, 20.0), (8, 90.0)))]
    root = ElementTree.fromstring(line_graph("decode & prefill", "streams", lines))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"<b>", "int8", "decode & prefill", "streams", "8"} <= set(texts)
    assert len([path for path in root.iter(f"{SVG}path") if path.get("class") == "line"]) == 2
    assert len(list(root.iter(f"{SVG}circle"))) == 4


def test_larger_numbers_are_higher() -> None:
    """Of two points at the same place, the larger one is nearer to the top."""
    root = ElementTree.fromstring(line_graph("t", "x", [Line("a", ((1, 10.0), (1, 20.0)))]))
    low, high = (float(circle.get("cy", "")) for circle in root.iter(f"{SVG}circle"))
    assert high < low


def test_ticks_are_round() -> None:
    """Between two numbers are 1, 2 and 5 times powers of ten."""
    assert ticks(3, 120) == [5, 10, 20, 50, 100]


def test_labels_keep_their_distance() -> None:
    """Labels of lines that end at the same place are spread, in their order."""
    moved = sorted(spread([50, 50, 49, 200, 201], lowest=202))
    assert all(after - before >= LABEL_STEP for before, after in pairwise(moved))
    assert moved[-1] == 202, "a label would cover those of the axis"


def test_no_points() -> None:
    """A graph without points is refused."""
    with pytest.raises(ValueError, match="needs points"):
        line_graph("t", "x", [])
