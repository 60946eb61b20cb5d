"""The table of measured families in `docs/operate/models.md` is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

from bench.model_table import BEGIN, DOCUMENT, END, HEADER, Parity, Row, Speed, described, write
from quipu.kernels.models.families import FAMILIES

ROW = Row(Parity(1e-7, 2e-6), Parity(0.01, 0.2), Parity(0.02, 0.3), Speed(5000.0, 60.0, 300.0), None)


def cells_of(text: str) -> list[list[str]]:
    """Return the cells of the table between the markers, without its header."""
    table = text.partition(BEGIN)[2].partition(END)[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]


def test_table_is_of_the_code() -> None:
    """Each family has a row with its formats and executors, and with numbers that a run with a date has measured."""
    text = DOCUMENT.read_text("utf-8")
    rows = cells_of(text)
    assert [row[:3] for row in rows] == [described(name) for name in sorted(FAMILIES)], (
        "run python -m bench.model_table --write"
    )
    number = r"[\d,]*\d(\.\d)?(e[-+]\d+)?"
    for row in rows:
        assert all(re.fullmatch(rf"{number}, {number}(, {number})?|refused", cell) for cell in row[3:]), row
        assert len(row) == HEADER.splitlines()[0].count("|") - 1
    assert re.search(rf"{BEGIN}\nMeasured on \d{{4}}-\d\d-\d\d on: .+, \d+ threads, `\w+`\.\n", text)


def test_written_between_the_markers(tmp_path: Path) -> None:
    """Only what is between the markers is replaced."""
    page = tmp_path / "models.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n", "utf-8")
    write({"LlamaForCausalLM": ROW}, page)
    text = page.read_text("utf-8")
    assert text.startswith(f"before\n\n{BEGIN}\n") and text.endswith(f"\n{END}\n\nafter\n") and "old" not in text
    (row,) = cells_of(text)
    assert row == [
        *described("LlamaForCausalLM"), "1.0e-07, 2.0e-06", "1.0e-02, 2.0e-01", "2.0e-02, 3.0e-01", "5,000, 60, 300",
        "refused",
    ]  # fmt: skip
