"""Philox4x32-10: random numbers that are a pure function of (key, counter).

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; checked against the
known-answer vectors of its authors' Random123.

What must always hold: there is no state. A draw does not depend on other draws or on the process, so a preempted or
restarted sequence continues as it would have without that.
"""

from __future__ import annotations

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Apply ten rounds to four 32-bit counter words with two 32-bit key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1), with 53 bits, of a 64-bit seed at an output position."""
    low, high, _, _ = philox4x32((position & _MASK, position >> 32 & _MASK, 0, 0), (seed & _MASK, seed >> 32 & _MASK))
    return ((high << 32 | low) >> 11) * 2.0**-53
