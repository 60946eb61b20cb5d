"""Bans tokens in logits of bfloat16 where they lie, if that is all that the rules of a pass do.

`logit_sampler.py` then draws without a copy of the logits in float32, which takes longer than the draws.

What must always hold: until they are restored, rows are as `logit_processors.edited` makes them; where that would take
more than a look at a few tokens, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ..logit_processors import Processing
from ..seen_tokens import Ids

Bits = npt.NDArray[np.uint16]

_INFINITY = np.uint16(0x7F80)
_NEVER = np.uint16(0xFF80)
"""Minus infinity."""
_MAGNITUDE = np.uint16(0x7FFF)
_LOOKED_AT = 64
"""Tokens of a row."""


@contextmanager
def banned(processing: Processing, place_of: Mapping[int, int], bits_PV: Bits) -> Iterator[bool]:
    """Ban what rows may not draw, and restore the logits on exit. `place_of`: where each row's logits are.

    Yields False, and changes nothing, if rules do more, if a ban would hide NaN or +inf, or if none of a row's first
    tokens is left, because then perhaps no token is.
    """
    replaced: list[tuple[Bits, Ids, Bits]] = []
    is_done = _ban(processing, place_of, bits_PV, replaced)
    if not is_done:
        _restore(replaced)
    try:
        yield is_done
    finally:
        _restore(replaced)


def _ban(
    processing: Processing, place_of: Mapping[int, int], bits_PV: Bits, replaced: list[tuple[Bits, Ids, Bits]]
) -> bool:
    """Return whether all is done. What was changed until then is in `replaced`."""
    if processing.masked_rows:
        return False
    for row, processor in zip(processing.rows, processing.processors, strict=True):
        ids = processor.bans_alone()
        if ids is None:
            return False
        bits_V = bits_PV[place_of[row]]
        bits = bits_V[ids]
        if (((bits & _MAGNITUDE) >= _INFINITY) & (bits != _NEVER)).any():
            return False
        replaced.append((bits_V, ids, bits))
        bits_V[ids] = _NEVER
        if (bits_V[:_LOOKED_AT] == _NEVER).all():
            return False
    return True


def _restore(replaced: list[tuple[Bits, Ids, Bits]]) -> None:
    while replaced:
        bits_V, ids, bits = replaced.pop()
        bits_V[ids] = bits
