"""One place decides which stream gets colours."""

from __future__ import annotations

import io

import pytest

from quipu.actors.shared.terminals import can_redraw, has_colors


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "on_screen", "in_file"),
    [
        ({}, True, False),
        ({"NO_COLOR": ""}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": "0"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"CLICOLOR_FORCE": "1", "CLICOLOR": "0"}, True, True),
        ({"CLICOLOR": "0"}, False, False),
        ({"CLICOLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
    ],
)
def test_colors(environment: dict[str, str], on_screen: bool, in_file: bool) -> None:
    """`NO_COLOR` beats what forces colours, which beats the kind of the stream."""
    given = {"TERM": "xterm", **environment}
    assert (has_colors(Screen(), given), has_colors(io.StringIO(), given)) == (on_screen, in_file)


def test_streams_that_do_not_redraw() -> None:
    """Neither a file nor a dumb terminal does, nor a stream that was closed before the process began."""
    assert can_redraw(Screen(), {"TERM": "xterm"}) and not can_redraw(Screen(), {"TERM": "dumb"})
    assert not can_redraw(Screen(), {}) and not can_redraw(io.StringIO(), {"TERM": "xterm"})
    assert not can_redraw(None, {"TERM": "xterm"}) and not has_colors(None, {"TERM": "xterm"})
