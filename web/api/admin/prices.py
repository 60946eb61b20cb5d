"""What tokens cost: the price list of `--prices FILE`, and exact sums of money.

    [[prices]]
    model = "demo"              # the name that clients ask for
    currency = "EUR"
    input = 0.50                # per million tokens
    cached_input = 0.05         # default: as input
    cached_input_host = 0.06    # loaded from the host's memory; default: as cached_input
    cached_input_disk = 0.08    # loaded from a disk; likewise
    cached_input_remote = 0.10  # loaded from an object store; likewise
    cache_write_5m = 0.60       # default: as input
    cache_write_1h = 1.00       # default: as input
    output = 1.50
    batch.input = 0.25          # of lines of batches, with the same fields and defaults; default: as above
    batch.output = 0.75
    from = 2026-01-01           # default: always; a later entry of the same model replaces an earlier one

What must always hold: amounts are decimal and exact until `rounded`, which is applied once, to the sum that is shown;
each prompt token has one price; a model without a price costs nothing and is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time
from decimal import ROUND_HALF_EVEN, Context, Decimal, Inexact
from pathlib import Path
from typing import Any, Final

import attrs

from quipu.actors.ledger.reading import Sum
from quipu.actors.messages.tiers import LOWER_TIERS
from quipu.actors.shared.bounded_toml import parse_toml

MAX_PRICES: Final = 1000
MAX_CHANGES: Final = 100
"""Distinct times at which prices change: a report asks the ledger once for each."""
MAX_NAME_CHARS: Final = 256
MAX_PRICE: Final = Decimal(10) ** 12
MAX_DIGITS: Final = 18
"""Of a price, so that amounts stay far below the precision of `_EXACT`."""
SHOWN_DIGITS: Final = 6
ALWAYS: Final = float("-inf")
_EXACT: Final = Context(prec=120, traps=[Inexact])
"""Raises an exception rather than round."""
_NUMBERS: Final = ("input", "output")
_REQUIRED: Final = ("model", "currency", *_NUMBERS)
_LIKE_INPUT: Final = ("cached_input", "cache_write_5m", "cache_write_1h")
_LIKE_CACHED: Final = tuple(f"cached_input_{tier}" for tier in LOWER_TIERS)

Amounts = Mapping[str, Decimal]
"""Money by currency, not rounded."""


class PriceError(Exception):
    """A price list cannot be used. The message names the entry and the field."""


_as_cached: Any = attrs.Factory(lambda price: price.cached_input, takes_self=True)


@attrs.frozen(kw_only=True)
class Price:
    """Prices of one model from a moment on, per million tokens."""

    model: str
    currency: str
    input: Decimal
    cached_input: Decimal
    cache_write_5m: Decimal
    cache_write_1h: Decimal
    output: Decimal
    cached_input_host: Decimal = _as_cached
    cached_input_disk: Decimal = _as_cached
    cached_input_remote: Decimal = _as_cached
    batch: Price | None = None
    """Prices of lines of batches. None: as for other requests."""
    starts: float = ALWAYS
    """Unix seconds, inclusive: compared with the time at which a request was closed."""

    def cost(self, one: Sum) -> Decimal:
        """Return the exact cost of a sum's tokens."""
        written = one.created_5m_tokens + one.created_1h_tokens
        loaded = one.cached_host_tokens + one.cached_disk_tokens + one.cached_remote_tokens
        parts = (
            (one.prompt_tokens - one.cached_tokens - written, self.input),
            (one.cached_tokens - loaded, self.cached_input),  # what no tier claims, too
            (one.cached_host_tokens, self.cached_input_host),
            (one.cached_disk_tokens, self.cached_input_disk),
            (one.cached_remote_tokens, self.cached_input_remote),
            (one.created_5m_tokens, self.cache_write_5m),
            (one.created_1h_tokens, self.cache_write_1h),
            (one.completion_tokens, self.output),
        )
        total = Decimal(0)
        for num_tokens, price in parts:
            total = _EXACT.add(total, _EXACT.multiply(Decimal(num_tokens), price))
        return _EXACT.scaleb(total, -6)


class PriceList:
    """The prices of all models. Raises PriceError if two of them contradict each other."""

    def __init__(self, prices: Sequence[Price]) -> None:
        self._by_model: dict[str, list[Price]] = {}
        for price in sorted(prices, key=lambda price: price.starts):
            of_model = self._by_model.setdefault(price.model, [])
            if of_model and of_model[-1].starts == price.starts:
                raise PriceError(f"two prices of model {price.model!r} have the same `from`")
            of_model.append(price)
        self._changes = sorted({price.starts for price in prices} - {ALWAYS})
        if len(self._changes) > MAX_CHANGES:
            raise PriceError(
                f"prices change at {len(self._changes)} different times; at most {MAX_CHANGES} may be used"
            )

    def at(self, model: str, moment: float) -> Price | None:
        """Return the price of a model that is in force at `moment` (Unix seconds)."""
        in_force = [price for price in self._by_model.get(model, ()) if price.starts <= moment]
        return in_force[-1] if in_force else None

    def periods(self, since: float | None, until: float | None) -> list[tuple[float | None, float | None]]:
        """Return the range in parts, oldest first, within each of which no price changes."""
        low, high = ALWAYS if since is None else since, float("inf") if until is None else until
        starts = [since, *(change for change in self._changes if low < change < high)]
        return list(zip(starts, [*starts[1:], until], strict=True))


def add_amounts(amounts: Sequence[Amounts]) -> dict[str, Decimal]:
    """Return the sums by currency, exactly."""
    total: dict[str, Decimal] = {}
    for one in amounts:
        for currency, amount in one.items():
            total[currency] = _EXACT.add(total.get(currency, Decimal(0)), amount)
    return total


def rounded(amount: Decimal) -> str:
    """Return an amount with six decimal places, halves to even, without trailing zeros beyond cents."""
    digits = f"{amount.quantize(Decimal(1).scaleb(-SHOWN_DIGITS), ROUND_HALF_EVEN, Context(prec=120)):f}"
    whole, _, fraction = digits.partition(".")
    return f"{whole}.{fraction.rstrip('0').ljust(2, '0')}"


def read_prices(path: Path) -> PriceList:
    """Read a price list. Raises PriceError."""
    try:
        # floats as they are written: 0.1 is a tenth
        content = parse_toml(path.read_bytes().decode(), parse_float=Decimal)
    except OSError as error:
        raise PriceError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PriceError(f"{path} is not UTF-8 text") from None
    except RecursionError:
        raise PriceError(f"{path} is nested too deeply") from None
    except (ValueError, ArithmeticError) as error:
        raise PriceError(f"{path}: {error}") from None
    try:
        return PriceList(_read_entries(content))
    except PriceError as error:
        raise PriceError(f"{path}: {error}") from None


def _read_entries(content: dict[str, Any]) -> list[Price]:
    if unknown := sorted(content.keys() - {"prices"}):
        raise PriceError(f"unknown field `{unknown[0]}` beside `prices`")
    entries = content.get("prices")
    if not isinstance(entries, list) or not entries:
        raise PriceError("at least one entry `[[prices]]` is required")
    if len(entries) > MAX_PRICES:
        raise PriceError(f"`prices` has {len(entries)} entries; at most {MAX_PRICES} may be used")
    return [_read_entry(entry, f"prices[{index}]") for index, entry in enumerate(entries)]


def _read_entry(raw: Any, where: str) -> Price:
    if not isinstance(raw, dict):
        raise PriceError(f"{where} must be a table")
    for name in _REQUIRED:
        if name not in raw:
            raise PriceError(f"{where}: `{name}` is required")
    if unknown := sorted(raw.keys() - {*_REQUIRED, *_LIKE_INPUT, *_LIKE_CACHED, "batch", "from"}):
        raise PriceError(f"{where}: unknown field `{unknown[0]}`")
    names = [_read_name(raw[name], f"{where}: `{name}`") for name in ("model", "currency")]
    numbers = _read_numbers(raw, where)
    batch = _read_batch(raw["batch"], names, f"{where}.batch") if "batch" in raw else None
    starts = _read_moment(raw["from"], f"{where}: `from`") if "from" in raw else ALWAYS
    return Price(model=names[0], currency=names[1], starts=starts, batch=batch, **numbers)


def _read_batch(raw: Any, names: list[str], where: str) -> Price:
    """Return the prices of lines of batches. Raises PriceError."""
    if not isinstance(raw, dict):
        raise PriceError(f"{where} must be a table")
    for name in _NUMBERS:
        if name not in raw:
            raise PriceError(f"{where}: `{name}` is required")
    if unknown := sorted(raw.keys() - {*_NUMBERS, *_LIKE_INPUT, *_LIKE_CACHED}):
        raise PriceError(f"{where}: unknown field `{unknown[0]}`")
    return Price(model=names[0], currency=names[1], **_read_numbers(raw, where))


def _read_numbers(raw: dict[str, Any], where: str) -> dict[str, Any]:
    numbers: dict[str, Any] = {name: _read_price(raw[name], f"{where}: `{name}`") for name in _NUMBERS}
    for name in _LIKE_INPUT:
        numbers[name] = _read_price(raw.get(name, raw["input"]), f"{where}: `{name}`")
    for name in _LIKE_CACHED:
        numbers[name] = _read_price(raw[name], f"{where}: `{name}`") if name in raw else numbers["cached_input"]
    return numbers


def _read_name(value: Any, where: str) -> str:
    if not (isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARS and value.isprintable()):
        raise PriceError(f"{where} must be 1 to {MAX_NAME_CHARS} printable characters")
    return value


def _read_price(value: Any, where: str) -> Decimal:
    if type(value) not in (int, Decimal):
        raise PriceError(f"{where} must be a number")
    price = Decimal(value)
    if not (price.is_finite() and 0 <= price <= MAX_PRICE):
        raise PriceError(f"{where} must be between 0 and {MAX_PRICE:f}")
    if len(price.as_tuple().digits) > MAX_DIGITS or price.adjusted() < -MAX_DIGITS:
        raise PriceError(f"{where} must have at most {MAX_DIGITS} digits")
    return price


def _read_moment(value: Any, where: str) -> float:
    """Return Unix seconds. A time without an offset is UTC, and a date is its midnight."""
    if type(value) is date:
        value = datetime.combine(value, time())
    if not isinstance(value, datetime):
        raise PriceError(f"{where} must be a date or a time, such as 2026-01-31 or 2026-01-31T12:00:00Z")
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
