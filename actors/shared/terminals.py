"""What a stream can show: whether it is a terminal that redraws, and whether it gets colours.

Everything that prints colours or redraws lines asks here, except for the kernels, which import nothing of the actors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO


def can_redraw(stream: TextIO | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a stream is a terminal on which lines can be drawn over."""
    return stream is not None and stream.isatty() and environment.get("TERM", "dumb") != "dumb"


def has_colors(stream: TextIO | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether what is printed on a stream is to have colours.

    `NO_COLOR` says never (https://no-color.org), `FORCE_COLOR` or `CLICOLOR_FORCE` even if the stream is no terminal,
    `CLICOLOR=0` not unless forced (https://bixense.com/clicolors); each counts if it is not empty, the forcing ones
    also if they are not 0.
    """
    if environment.get("NO_COLOR"):
        return False
    if any(environment.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return environment.get("CLICOLOR") != "0" and can_redraw(stream, environment)
