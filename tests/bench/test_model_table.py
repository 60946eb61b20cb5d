"""The table of measured families in `docs/operate/models.md` is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

from bench.model_table import BEGIN, DOCUMENT, END, HEADER, Parity, Row, Speed, described, read_rows, write
from quipu.kernels.models.families import FAMILIES

ROW = Row(Parity(1e-7, 2e-6), Parity(0.01, 0.2), Parity(0.02, 0.3), Speed(5000.0, 60.0, 300.0), None)


def table_of(text: str) -> dict[str, list[str]]:
    """Return the cells of the table between the markers, by the family's name."""
    return read_rows(text.partition(BEGIN)[2].partition(END)[0])


def test_table_is_of_the_code() -> None:
    """Each family has a row with its formats and executors, and with numbers that a run with a date has measured."""
    text = DOCUMENT.read_text("utf-8")
    rows = list(table_of(text).values())
    assert [row[:3] for row in rows] == [described(name) for name in sorted(FAMILIES)], (
        "run python -m bench.model_table --write"
    )
    number = r"[\d,]*\d(\.\d)?(e[-+]\d+)?"
    for row in rows:
        assert all(re.fullmatch(rf"{number}, {number}(, {number})?|refused", cell) for cell in row[3:]), row
        assert len(row) == HEADER.splitlines()[0].count("|") - 1
    assert re.search(rf"{BEGIN}\nMeasured on \d{{4}}-\d\d-\d\d or before on: .+, \d+ threads, `\w+`\.\n", text)


def test_written_between_the_markers(tmp_path: Path) -> None:
    """Only what is between the markers is replaced; a family that was not measured keeps its numbers, if it is one."""
    page = tmp_path / "models.md"
    lines = [f"| `{name}` | old | old | 1 | 2 | 3 | 4 | 5 |" for name in ("GoneForCausalLM", "Qwen3ForCausalLM")]
    page.write_text("\n".join(["before\n", BEGIN, "old", *lines, END, "\nafter\n"]), "utf-8")
    write({"LlamaForCausalLM": ROW}, page)
    text = page.read_text("utf-8")
    assert text.startswith(f"before\n\n{BEGIN}\n") and text.endswith(f"\n{END}\n\nafter\n") and "old" not in text
    rows = table_of(text)
    assert list(rows) == ["LlamaForCausalLM", "Qwen3ForCausalLM"]
    assert rows["Qwen3ForCausalLM"] == [*described("Qwen3ForCausalLM"), "1", "2", "3", "4", "5"]
    assert rows["LlamaForCausalLM"] == [
        *described("LlamaForCausalLM"), "1.0e-07, 2.0e-06", "1.0e-02, 2.0e-01", "2.0e-02, 3.0e-01", "5,000, 60, 300",
        "refused",
    ]  # fmt: skip
