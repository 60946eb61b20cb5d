"""Traces for tests: requests whose ids name their prefixes, as in the files that `bench.trace_replay` reads."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
from hypothesis import strategies as st


@attrs.frozen
class Row:
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def write_trace(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(attrs.asdict(row)) + "\n" for row in rows))
    return path


@st.composite
def traces(draw: st.DrawFn, block: int = 4, max_requests: int = 40) -> list[Row]:
    """Draw conversations: prompts that share a prefix with an earlier one, or none. Partial blocks have an id too."""
    ids: dict[tuple[int, ...], int] = {}
    prompts: list[tuple[int, ...]] = []
    rows = []
    now = 0
    for _ in range(draw(st.integers(1, max_requests))):
        now += draw(st.sampled_from([0, 0, 1, 5, 50]))
        blocks: tuple[int, ...] = ()
        if prompts and draw(st.integers(0, 3)):
            earlier = draw(st.sampled_from(prompts))
            blocks = earlier[: draw(st.integers(0, len(earlier)))]
        blocks += tuple(draw(st.lists(st.integers(0, 2), min_size=0 if blocks else 1, max_size=6)))
        prompts.append(blocks)
        rows.append(
            Row(
                timestamp=now,
                input_length=len(blocks) * block - draw(st.integers(0, block - 1)),
                output_length=draw(st.integers(1, 3 * block)),
                hash_ids=[ids.setdefault(blocks[: n + 1], len(ids)) for n in range(len(blocks))],
            )
        )
    return rows
