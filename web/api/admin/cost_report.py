"""Usage with its cost: the ledger's sums by group and bucket, priced by what was in force when each request closed.

    parts = [(period, reader.sums(...)) for period in split(query, prices)]
    lines = price_parts(parts, by, prices)

What must always hold: a line's numbers are those of the ledger, since the parts of a range are disjoint and complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from quipu.actors.ledger.reading import GroupColumn, Query, Sum
from quipu.actors.messages.usage_record import ServiceTier

from .prices import ALWAYS, Amounts, PriceList, add_amounts, rounded

NUMBERS: Final = tuple(field.name for field in attrs.fields(Sum) if field.name not in ("bucket", "group"))


@attrs.frozen
class CostLine:
    """The sum of one group in one bucket, and what it costs."""

    sum: Sum
    amounts: Amounts
    """Empty without prices, and for models that have none."""
    unpriced_models: tuple[str, ...] = ()
    """Models with tokens and without a price; empty without prices."""

    @property
    def cost(self) -> dict[str, str]:
        """By currency, rounded."""
        return {currency: rounded(amount) for currency, amount in sorted(self.amounts.items())}


def split(query: Query, prices: PriceList | None) -> list[Query]:
    """Return a query for each part of its range in which no price changes."""
    if prices is None:
        return [query]
    return [attrs.evolve(query, since=since, until=until) for since, until in prices.periods(query.since, query.until)]


def columns(by: Sequence[GroupColumn], prices: PriceList | None) -> list[GroupColumn]:
    """Return the columns by which the ledger has to group."""
    needed: tuple[GroupColumn, ...] = () if prices is None else ("model", "parent", "service_tier")
    return [*by, *(name for name in needed if name not in by)]


def price_parts(
    parts: Sequence[tuple[Query, Sequence[Sum]]], by: Sequence[GroupColumn], prices: PriceList | None
) -> list[CostLine]:
    """Return a line for each bucket and group of `by`, oldest first.

    `parts` has, for each query of `split`, the ledger's sums over `columns`.
    """
    lines: dict[tuple[object, ...], list[CostLine]] = {}
    for query, sums in parts:
        for one in sums:
            line = _priced(one, query, prices)
            kept = attrs.evolve(one, group={name: one.group[name] for name in by})
            key = (one.bucket, *kept.group.values())
            lines.setdefault(key, []).append(attrs.evolve(line, sum=kept))
    return sorted(map(total, lines.values()), key=_order)


def total(lines: Sequence[CostLine]) -> CostLine:
    """Return the sum of lines, with the bucket and group of the first."""
    summed = {name: sum(getattr(line.sum, name) for line in lines) for name in NUMBERS}
    first = lines[0].sum if lines else Sum()
    return CostLine(
        Sum(bucket=first.bucket, group=first.group, **summed),
        add_amounts([line.amounts for line in lines]),
        tuple(sorted({model for line in lines for model in line.unpriced_models})),
    )


def _priced(one: Sum, query: Query, prices: PriceList | None) -> CostLine:
    if prices is None or not (one.prompt_tokens or one.completion_tokens):
        return CostLine(one, {})
    model, parent = one.group["model"] or "", one.group.get("parent")
    moment = ALWAYS if query.since is None else query.since
    price = prices.at(model, moment)
    if price is None and parent is not None:  # an adapter without a price costs what its model costs
        price = prices.at(parent, moment)
    if price is None:
        return CostLine(one, {}, (model,))
    if one.group.get("service_tier") == ServiceTier.BATCH and price.batch is not None:
        price = price.batch
    return CostLine(one, {price.currency: price.cost(one)})


def _order(line: CostLine) -> tuple[float, list[tuple[bool, str]]]:
    names = [(value is not None, str(value)) for value in line.sum.group.values()]
    return (0.0 if line.sum.bucket is None else line.sum.bucket, names)
