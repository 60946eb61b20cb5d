"""What reaches a terminal, and what reaches a file or a pipe."""

from __future__ import annotations

import io

import pytest

from quipu.web.cli.bench.answer import Piece
from quipu.web.cli.chat.terminal import Terminal
from tests.web.cli.chat.scripted_chats import Screen

HOSTILE = "a\x1b[2Jb\x07\x9b1m\r\n\tü 🪢"
DIM, NORMAL = "\x1b[2m", "\x1b[22m"


def terminal_on(output: io.StringIO, errors: io.StringIO, term: str = "xterm") -> Terminal:
    return Terminal.of(io.StringIO(), output, errors, {"TERM": term})


def test_control_characters_of_a_server_do_not_reach_a_terminal() -> None:
    """On a terminal only tabs and line ends of an answer, a notice or an error remain; a file gets the text itself."""
    screen = Screen()
    terminal = terminal_on(screen, screen, term="dumb")
    terminal.show(Piece(HOSTILE, is_reasoning=True))
    terminal.show(Piece(HOSTILE))
    terminal.end_answer()
    terminal.note(HOSTILE)
    terminal.complain(HOSTILE)
    shown = screen.getvalue()
    assert not any((char < " " and char not in "\n\t") or "\x7f" <= char < "\xa0" for char in shown)
    assert shown.startswith("a\ufffd[2Jb\ufffd\ufffd1m\n\tü 🪢\n")
    file = io.StringIO()
    terminal_on(file, screen).show(Piece(HOSTILE))
    assert file.getvalue() == HOSTILE


def test_reasoning_and_counts_are_dim_on_a_terminal() -> None:
    """Dim text ends with the call that wrote it, so nothing that follows is dim, whatever happens."""
    screen = Screen()
    terminal = terminal_on(screen, screen)
    terminal.show(Piece("hm", is_reasoning=True))
    terminal.show(Piece("yes"))
    terminal.end_answer()
    terminal.note("prompt 1")
    terminal.complain("no")
    assert screen.getvalue() == f"{DIM}hm{NORMAL}\nyes\n{DIM}prompt 1{NORMAL}\nquipu: no\n"


@pytest.mark.parametrize("errors", [io.StringIO(), Screen()], ids=["a file", "a dumb terminal"])
def test_no_colours_elsewhere(errors: io.StringIO) -> None:
    """A file and a terminal that knows no escape sequences get none."""
    terminal_on(io.StringIO(), errors, term="dumb" if errors.isatty() else "xterm").note("prompt 1")
    assert errors.getvalue() == "prompt 1\n"


def test_streams_of_any_encoding() -> None:
    """What a stream cannot encode or decode is replaced instead of ending the chat."""
    output = io.TextIOWrapper(io.BytesIO(), "ascii")
    given = io.TextIOWrapper(io.BytesIO(b"w\xff\r\nlast"), "utf-8", newline="")
    terminal = Terminal.of(given, output, io.StringIO(), {})
    assert [terminal.read_line() for _ in range(3)] == ["w\ufffd", "last", None]
    terminal.show(Piece("wörd"))
    output.seek(0)
    assert output.buffer.read() == b"w?rd"
