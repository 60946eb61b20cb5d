"""What all commands have in common: mistakes, readers that go, interruptions, and how little is loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quipu.web.cli import cli
from quipu.web.cli.cli import main

COMMAND = (sys.executable, "-m", "quipu.web.cli.cli")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.err.count("\n") == 1 and not said.out
    return said.err


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (("modles",), "models"),
        (("--versoin",), "--version"),
        (("keys", "nwe"), "new"),
        (("ledger", "verfy"), "verify"),
        (("bench", "serv"), "serve"),
        (("usage", "--retries", "colapse"), "collapse"),
        (("serve", "--log-level", "warnin"), "warning"),
    ],
)
def test_nearest_word(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], near: str) -> None:
    """A mistyped command, or value of a flag, is answered with the nearest one."""
    assert f"did you mean {near}?" in refused(capsys, *argv)


@pytest.mark.parametrize("group", ["keys", "ledger", "bench"])
def test_commands_of_commands(capsys: pytest.CaptureFixture[str], group: str) -> None:
    """Without one, the error lists them; so does one for a word that resembles none."""
    assert "error: say which: " in refused(capsys, group)
    assert "choose from " in refused(capsys, group, "zzz")


def test_errors_stay_short(capsys: pytest.CaptureFixture[str]) -> None:
    """However many values a flag allows, and however long the word is."""
    assert len(refused(capsys, "doctor", "--port", "99999")) < 200
    assert len(refused(capsys, "z" * 10_000)) < 600


def test_first_steps_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "quipu serve demo" in capsys.readouterr().out
    for argv in (["--help"], ["help"], ["help", "usage"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0 and "usage: quipu" in capsys.readouterr().out


def test_help_needs_no_libraries() -> None:
    """Whoever asks for the commands, or mistypes one, waits for no library."""
    code = (
        "import sys, quipu.web.cli.cli as cli\n"
        "cli.main([])\n"
        "for argv in (['--help'], ['modles']):\n"
        "    try: cli.main(argv)\n"
        "    except SystemExit: pass\n"
        "print({'torch', 'numpy', 'attrs', 'sqlalchemy', 'quart', 'trio', 'httpx2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_reader_that_is_gone(monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    """`quipu --help | head -1` and the like end quietly, although something is left to write."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    for argv in ((), ("--help",), ("usage", "--help")):
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = subprocess.run([*COMMAND, *argv], stdout=write_end, stderr=subprocess.PIPE)
        os.close(write_end)
        assert (done.returncode, done.stderr) == (0, b"")


def test_disk_that_is_full() -> None:
    """An output that cannot be written is an error."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(COMMAND, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and done.stderr == b"quipu: cannot write the output: No space left on device\n"


def test_output_that_is_closed() -> None:
    """A process without stdout and stderr still ends with its exit code."""
    shell = 'exec "$0" -m quipu.web.cli.cli "$@" >&- 2>&-'
    assert subprocess.run(["sh", "-c", shell, sys.executable], check=False).returncode == 0
    assert subprocess.run(["sh", "-c", shell, sys.executable, "modles"], check=False).returncode == 2


def test_interruption(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends every command with 130 and a line, wherever it was."""

    class Interrupted:
        @staticmethod
        def main(argv: list[str]) -> int:
            signal.raise_signal(signal.SIGINT)
            return 0

    monkeypatch.setattr(cli, "_module", lambda name: Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        code = main(["usage"])
    except KeyboardInterrupt:  # it would end the tests
        pytest.fail("the interruption was not caught")
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    assert capsys.readouterr().err == "quipu: interrupted\n"
