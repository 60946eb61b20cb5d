"""The checkpoint of the tests: a tiny Qwen3 with random weights, made by `tests/checkpoints/make_tiny.py`.

Servers offer it under the name `demo`, like the model that is part of the package.
"""

from __future__ import annotations

from pathlib import Path

TINY = Path(__file__).resolve().parent / "checkpoints" / "tiny"
