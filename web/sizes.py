"""Sizes in bytes as operators write them. Used by `serve_flags.py`."""

from __future__ import annotations

import argparse
import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `512MiB`, `1.5GB` or `4294967296`.

    `K`, `M`, `G`, `T` alone and with `iB` are powers of 1024, `kB`, `MB`, `GB`, `TB` powers of 1000; so are the small
    letters alone, as vLLM has them. Raises ArgumentTypeError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is not None:
        unit = match[2].removesuffix("iB").removesuffix("B")
        if unit.lower() in _POWERS and match[2] in ("", "B", unit, unit + "B", unit + "iB"):
            is_decimal = match[2] == unit + "B" or (match[2] == unit and unit.islower())
            size = int(float(match[1]) * (1000 if is_decimal else 1024) ** _POWERS[unit.lower()])
            if size > 0:
                return size
    raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 4GiB or 512MiB")
