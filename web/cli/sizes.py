"""Sizes in bytes as operators write them. Used by `serve_flags.py` and `setting_flags.py`."""

from __future__ import annotations

import argparse
import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKmMgGtT])(iB|B)?|B)?")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `512MiB`, `1.5GB` or `4294967296`.

    `K`, `M`, `G`, `T` alone and with `iB` are powers of 1024, `kB`, `MB`, `GB`, `TB` powers of 1000; so are
    lowercase letters alone, as in vLLM. Raises ArgumentTypeError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is not None:
        number, letter, ending = match.groups(default="")
        is_decimal = ending == "B" or (ending == "" and letter.islower())
        size = int(float(number) * (1000 if is_decimal else 1024) ** _POWERS.get(letter.lower(), 0))
        if size > 0:
            return size
    raise argparse.ArgumentTypeError(f"must be a size such as 4GiB or 512MiB, not {text!r}")
