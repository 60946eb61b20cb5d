"""The examples of docs/use/python.md run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/use/python.md"


def test_examples_run() -> None:
    """Both examples run on the demo model, and print texts and numbers of cached tokens."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert any(line.endswith(" 0") for line in lines) and lines[-1].startswith("Usage(prompt_tokens=")
