"""Checks of the unit for systemd, with systemd's own programs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.deploy.checks import Failed, program, run

UNIT = Path(__file__).resolve().parent.parent.parent / "deploy/quipu.service"
MAX_EXPOSURE = 3.0
"""systemd calls up to 4.9 "OK"; most services have 9 and more."""


def check_unit(folder: Path) -> str:
    """Have systemd read the unit, and rate what the service could reach. Returns a summary."""
    analyze = program("systemd-analyze", "systemd")
    unit = folder / UNIT.name
    installed = Path(sys.executable).with_name("quipu")
    unit.write_text(UNIT.read_text().replace("/opt/quipu/.venv/bin/quipu", str(installed)))
    verdict = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, check=False)
    if verdict.returncode or verdict.stderr:  # what it only warns of is on stderr, too
        raise Failed(verdict.stderr)
    report = run(analyze, "security", "--offline=yes", "--no-pager", str(unit))
    found = re.search(r"exposure level for quipu.service: ([0-9.]+)", report)
    if found is None or float(found[1]) > MAX_EXPOSURE:
        raise Failed(report)
    return f"read by systemd-analyze, exposure {found[1]} of 10"
