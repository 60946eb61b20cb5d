"""What the demo model can do, asked over HTTP: right answers, from cases that it was never trained on.

    python -m bench.demo_model [--json] [--base-url URL] [--cases 200] [--seed N]

Without `--base-url` it starts `quipu serve`. Values are percentages, but for `bits_per_byte`. Calls and thinking are
read from the raw text of rendered prompts. docs/internals/demo-model.md explains the rows.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from typing import Any

from bench import demo_rows
from bench.demo_client import Client, served
from quipu.kernels.demo.chat_encoder import ChatEncoder
from quipu.kernels.demo.text.chat_mixture import HELD_OUT

MEASURES = (
    demo_rows.recall, demo_rows.recall_cached_same, demo_rows.tool_call, demo_rows.json_answers, demo_rows.thinking,
    demo_rows.stories, demo_rows.bits_per_byte,
)  # fmt: skip
WANTED: dict[str, tuple[float | None, str]] = {
    "recall": (95.0, "higher"),
    "recall_worst_tenth": (85.0, "higher"),
    "recall_without_document": (15.0, "lower"),
    "recall_cached_same": (100.0, "higher"),
    "tool_call": (90.0, "higher"),
    "json": (90.0, "higher"),
    "json_values": (90.0, "higher"),
    "arithmetic": (None, "higher"),
    "stops": (99.0, "higher"),
    "story": (95.0, "higher"),
    "story_checker": (95.0, "higher"),
    "bits_per_byte": (None, "lower"),
}
"""What each row should reach, if anything, and which direction is better."""


def measure(base_url: str, num_cases: int, first_seed: int) -> list[dict[str, Any]]:
    """Measure all rows against the server at `base_url`."""
    client = Client(base_url)
    cases = demo_rows.Cases(client, ChatEncoder(), num_cases, first_seed)
    values: dict[str, float] = {}
    for row in MEASURES:
        values |= row(cases)
    values["stops"] = demo_rows.percent([reason == "stop" for reason in client.finish_reasons])
    return [
        {"name": name, "value": round(values[name], 3), "wanted": wanted, "better": better}
        for name, (wanted, better) in WANTED.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the demo model can do.")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--base-url", help="a server of the demo model; without it, one is started")
    parser.add_argument("--cases", type=int, default=200, help="cases of each row (200)")
    parser.add_argument("--seed", type=int, default=HELD_OUT, help="first seed of the cases")
    parser.add_argument("--model", default="demo", help="the checkpoint to serve (demo)")
    parser.add_argument("--quick", action="store_true", help="smoke test: one case a row")
    arguments = parser.parse_args()
    server = nullcontext(arguments.base_url) if arguments.base_url else served(arguments.model)
    with server as base_url:
        rows = measure(base_url, 1 if arguments.quick else arguments.cases, arguments.seed)
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        wanted = "" if row["wanted"] is None else f"{'>=' if row['better'] == 'higher' else '<='} {row['wanted']:g}"
        print(f"{row['name']:<26}{row['value']:>9.2f}   {wanted}")


if __name__ == "__main__":
    main()
