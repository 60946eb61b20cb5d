"""Rows that load and unload adapters, as an operator's client might: large ones, many times, at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bench.stalls.attack import RawRequest
from bench.stalls.row_parts import MEBIBYTE, Row, one, posted

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LARGE_BYTES = 4 * MEBIBYTE
"""The fake executor reads them on its event loop; others have a thread for it."""
LARGE, SMALL = "large", "small"
FLAGS = ("--enable-lora", "--max-loras", "2", "--lora-dir", "demo")
"""Of a server that runs where its checkpoint's folder `demo` is."""


def make_adapters(checkpoint: Path) -> None:
    """Make two adapters in a checkpoint's folder, of which the fake executor reads each byte and no more."""
    for name, num_bytes in ((LARGE, LARGE_BYTES), (SMALL, 1)):
        folder = checkpoint / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
        with (folder / "adapter_model.safetensors").open("wb") as weights:
            weights.truncate(num_bytes)


def _load(path: str) -> dict[str, Any]:
    return {"lora_name": "one", "lora_path": path, "load_inplace": True}


def _in_turn(times: int) -> Callable[[int], Sequence[RawRequest]]:
    """Load a small adapter and unload it, so many times, whichever comes first."""
    sent = [(LOAD, _load(SMALL)), (UNLOAD, {"lora_name": "one"})]

    def make(port: int) -> Sequence[RawRequest]:
        return [RawRequest(posted(port, path, json.dumps(body).encode())) for path, body in islice(cycle(sent), times)]

    return make


ADAPTER_ROWS: Sequence[Row] = (
    Row("adapter of 4 MB, 8 times", one(LOAD, lambda: _load(LARGE), 8), concurrency=8, server="adapting"),
    Row("adapters loaded and unloaded", _in_turn(200), concurrency=16, server="adapting"),
    Row("adapter's path, largest body", one(LOAD, lambda: _load("x/" * (4 * MEBIBYTE - 200)), 4), 4, "adapting"),
    Row(
        "adapter's name, largest body", one(UNLOAD, lambda: {"lora_name": "x" * (8 * MEBIBYTE - 200)}, 4), 4, "adapting"
    ),
)
