"""Tells which numeric limits of a JSON schema the grammar library enforces, and rewrites ranges so that it does.

The library reads numbers as doubles, and takes exclusive bounds for inclusive ones in ranges shorter than 1. Used by
`schema_keywords.py` and `schema_holes.py`. What must always hold: a bound that is changed excludes the same values.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeGuard

BOUNDS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"})
COUNTS = frozenset(f"{end}{what}" for end in ("min", "max") for what in ("Items", "Length", "Properties"))
INEXACT = "numbers beyond 2**53 are not exact"
MAX_COUNT = 1 << 31
"""Outputs are never this long, so a larger upper limit has no effect."""
_EXACT = 1 << 53
"""Larger numbers are rounded by the library, and by many readers of JSON."""
_TINY = 2.0**-40
"""Stands for the smallest positive number, which has 324 digits."""
_TOO_LARGE = 10**18
"""The library cannot enforce a range with a larger bound."""
_MAX_MULTIPLE = 20_000
"""Without the decimal point. Larger multiples take seconds to compile, except for powers of ten."""
_MAX_DECIMALS = 9


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_count(value: object) -> int | None:
    """Return a limit on a count; None if the value is not a non-negative integer."""
    if not is_number(value) or value < 0 or (isinstance(value, float) and not value.is_integer()):
        return None
    return int(value)


def as_float(number: int | float) -> float:
    """Return the nearest double, which may be infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def is_inexact(value: object) -> bool:
    return is_number(value) and abs(value) > _EXACT


def is_held_multiple(value: object) -> bool:
    """Return whether the library, which shifts the decimal point of a double, enforces multiples of a number."""
    if not is_number(value) or not 0 < value < 10**_MAX_DECIMALS:
        return False
    shifted, num_decimals = float(value), 0
    while not shifted.is_integer() and num_decimals < _MAX_DECIMALS:
        shifted, num_decimals = shifted * 10, num_decimals + 1
    is_small = shifted <= _MAX_MULTIPLE or Decimal(shifted).normalize().as_tuple().digits == (1,)
    return is_small and Decimal(repr(value)) == Decimal(shifted).scaleb(-num_decimals)


def is_held_bound(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Return whether the library enforces a bound: it must be a double, or the largest 64-bit integer."""
    bound = schema[keyword]
    if keyword == "maximum" and bound == (1 << 63) - 1 and type(bound) is int:
        kind = schema.get("type")
        return kind == "integer" or (isinstance(kind, list) and "integer" in kind and "number" not in kind)
    if keyword.startswith("exclusive") or not is_inexact(bound):
        return not is_inexact(bound)
    return bool(abs(bound) < _TOO_LARGE and int(float(bound)) == bound)


def shift_bounds(schemas: list[dict[str, Any]]) -> None:
    """Shift whole exclusive bounds that could be an end of a range shorter than 1.

    The ends of a range may be in different schemas, such as those of `allOf`.
    """
    fractions = sorted({bound for schema in schemas for bound in map(schema.get, BOUNDS) if _is_fraction(bound)})
    for schema in schemas:
        for end, sign in (("Minimum", 1), ("Maximum", -1)):
            # draft 4 has a flag
            keyword = end.lower() if schema.get(f"exclusive{end}") is True else f"exclusive{end}"
            bound = schema.get(keyword)
            if not is_number(bound) or _is_fraction(bound):
                continue
            low, high = sorted((bound, bound + sign))
            if bisect_right(fractions, low) < bisect_left(fractions, high):
                schema[keyword] = math.nextafter(bound, bound + sign) if bound else sign * _TINY


def _is_fraction(bound: object) -> TypeGuard[float]:
    return isinstance(bound, float) and not bound.is_integer()
