"""The commands of `docs/operate/bill.md`, read from the page and run in its order: they print what the page says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

from tests.e2e.script_quipu import quipu_for_scripts
from tests.e2e.servers import PATIENCE_S
from tests.processes import free_ports

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate" / "bill.md"
MARK = "== next block =="


def blocks() -> list[tuple[str, str]]:
    """Return the page's commands, each with what it is said to print."""
    found: list[tuple[str, str]] = []
    for language, text in re.findall(r"^```(bash|text)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        if language == "bash":
            found.append((text, ""))
        else:
            found[-1] = (found[-1][0], text)
    return found


def pattern(text: str) -> str:
    """Return a pattern of a printed text, in which `…` stands for an id."""
    return r"\S+".join(map(re.escape, text.split("\u2026")))


def test_the_walk(tmp_path: Path) -> None:
    """Keys, requests, reports, the receipt and the checks of the books: every line is as on the page."""
    walk = blocks()
    script = "".join(f"{commands}echo '{MARK}'\n" for commands, _ in walk)
    script = script.replace("serve demo ", "serve demo --port $PORT ").replace("127.0.0.1:8000", "127.0.0.1:$PORT")
    with quipu_for_scripts(tmp_path / "bin") as path:
        folder = tmp_path / "empty"
        folder.mkdir()
        with subprocess.Popen(
            ["bash", "-uc", script],
            cwd=folder,
            env={**os.environ, "PATH": path, "PORT": str(free_ports(1)[0])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as shell:
            try:
                printed = shell.communicate(timeout=2 * PATIENCE_S)[0].split(f"{MARK}\n")
            finally:
                if shell.poll() is None:
                    os.killpg(shell.pid, signal.SIGKILL)
    for (commands, said), found in zip(walk, printed, strict=False):
        assert re.fullmatch(pattern(said), found), f"{commands}\nprinted:\n{found}"
    assert len(printed) == len(walk) + 1
