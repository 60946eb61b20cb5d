"""Metric families with one series per engine, for `metrics.py`.

The label `engine` appears once there have been several engines. What belongs to no engine, for example a request that
was refused, has an empty label.

What must always hold: counters never decrease, so an engine's stay when it is removed, and their sum over the engines
is the server's. Not thread-safe: written and read in one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import attrs
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


@attrs.define
class EngineLabels:
    """Which engines have series, and what they are labelled with."""

    model_name: str
    engines: dict[int, None]
    """The ids of those there are, in order."""
    is_shown: bool
    """Whether there have been several."""
    num_upstreams: int = 0

    @classmethod
    def of(cls, model_name: str, num_engines: int = 1) -> EngineLabels:
        """Return the labels of a server's first engines."""
        return cls(model_name, dict.fromkeys(range(num_engines)), is_shown=num_engines > 1)

    def add(self, engine_id: int) -> None:
        self.engines[engine_id] = None
        self.is_shown |= len(self.engines) + self.num_upstreams > 1

    def add_upstream(self, engine_id: int) -> None:
        """Note a server that is not one of the engines, whose values are shown where there are any."""
        self.num_upstreams += 1
        self.is_shown |= len(self.engines) + self.num_upstreams > 1

    def remove(self, engine_id: int) -> None:
        self.engines.pop(engine_id, None)

    @property
    def names(self) -> list[str]:
        return ["model_name", "engine"] if self.is_shown else ["model_name"]

    def values(self, engine_id: int | None) -> list[str]:
        if not self.is_shown:
            return [self.model_name]
        return [self.model_name, "" if engine_id is None else str(engine_id)]

    def series(self, with_values: Sequence[int | None]) -> list[int | None]:
        """Return the engines to show: those there are, then others with values."""
        shown: list[int | None] = [*self.engines]
        return [*shown, *(engine_id for engine_id in with_values if engine_id not in self.engines)]


Value = str | tuple[str, ...]
"""The value of a family's own label, or one of each of its labels."""


def _several(names: Value) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


class _Family(Collector):
    """Numbers by engine and by the values of other labels, if there are any."""

    _make: type[CounterMetricFamily] | type[GaugeMetricFamily]

    def __init__(
        self,
        name: str,
        text: str,
        labels: EngineLabels,
        label: str | tuple[str, ...] | None = None,
        values: Sequence[Value] = (),
    ) -> None:
        """`label` is one label, or several; `values` are those of which numbers are shown even if they are 0."""
        self._name = f"quipu:{name}"
        self._text = text
        self._labels = labels
        self._label = label
        self._shown = dict.fromkeys(values if label is not None else ("",))
        self._numbers: dict[int | None, dict[Value, float]] = {}

    def value(self, engine_id: int | None, value: Value = "") -> float:
        return self._numbers.get(engine_id, {}).get(value, 0.0)

    def _shown_numbers(self) -> dict[int | None, dict[Value, float]]:
        return self._numbers

    def _series(self, numbers: Mapping[int | None, object]) -> list[int | None]:
        """Return the engines to show, of which `numbers` has those with values."""
        return self._labels.series(list(numbers))

    def collect(self) -> Iterator[Metric]:
        own = _several(() if self._label is None else self._label)
        family = self._make(self._name, self._text, labels=[*self._labels.names, *own])
        numbers = self._shown_numbers()
        for engine_id in self._series(numbers):
            of_engine = numbers.get(engine_id, {})
            for value in {**self._shown, **of_engine}:
                labels = [*self._labels.values(engine_id), *(_several(value) if own else ())]
                family.add_metric(labels, of_engine.get(value, 0.0))
        yield family


class EngineCounter(_Family):
    """A counter. What is counted for no engine is not shown until it is counted."""

    _make = CounterMetricFamily

    def inc(self, amount: float, engine_id: int | None, value: Value = "") -> None:
        of_engine = self._numbers.setdefault(engine_id, {})
        of_engine[value] = of_engine.get(value, 0.0) + amount

    def _shown_numbers(self) -> dict[int | None, dict[Value, float]]:
        if self._labels.is_shown:
            return self._numbers
        total: dict[Value, float] = {}
        for of_engine in self._numbers.values():
            for value, number in of_engine.items():
                total[value] = total.get(value, 0.0) + number
        return {0: total}


class EngineGauge(_Family):
    """A gauge of each engine that there is."""

    _make = GaugeMetricFamily

    def values(self, engine_id: int) -> dict[Value, float]:
        """Return an engine's numbers by the values of the other labels."""
        return self._numbers.get(engine_id, {})

    def set(self, number: float, engine_id: int) -> None:
        self._numbers[engine_id] = {"": number}

    def set_all(self, numbers: dict[Value, float], engine_id: int) -> None:
        """Set an engine's numbers for all values of the other label; the dictionary is kept."""
        self._numbers[engine_id] = numbers

    def forget(self, engine_id: int) -> None:
        self._numbers.pop(engine_id, None)


class UpstreamGauge(EngineGauge):
    """A gauge of each upstream that there is."""

    def _series(self, numbers: Mapping[int | None, object]) -> list[int | None]:
        return list(numbers)


class EngineText(Collector):
    """A text for each engine that there is, as a label; the value is 1. Looked up when metrics are read."""

    def __init__(
        self, name: str, text: str, labels: EngineLabels, label: str, look_up: Callable[[], Mapping[int, str]]
    ) -> None:
        self._name, self._text, self._labels = f"quipu:{name}", text, labels
        self._label = label
        self._look_up = look_up

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=[*self._labels.names, self._label])
        for engine_id, value in self._look_up().items():
            family.add_metric([*self._labels.values(engine_id), value], 1)
        yield family


class BulkHistogram(Collector):
    """A histogram that can observe many equal values at once.

    For one value it takes a third of the client library's time.
    """

    def __init__(self, name: str, text: str, labels: EngineLabels, buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._labels = f"quipu:{name}", text, labels
        self._bounds = buckets
        self._numbers: dict[int | None, tuple[list[int], list[float]]] = {}
        """By engine: how many were observed in each bucket, and their sum."""

    def observe(self, number: float, count: int = 1, engine_id: int | None = None) -> None:
        counts, total = self._numbers.get(engine_id) or self._numbers.setdefault(engine_id, self._nothing())
        counts[bisect_left(self._bounds, number)] += count
        total[0] += number * count

    def _nothing(self) -> tuple[list[int], list[float]]:
        return [0] * (len(self._bounds) + 1), [0.0]

    def collect(self) -> Iterator[Metric]:
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels.names)
        numbers = self._numbers
        if not self._labels.is_shown:
            columns = zip(*(counts for counts, _ in numbers.values()), strict=True)
            total = [sum(column) for column in columns] or self._nothing()[0]
            numbers = {0: (total, [sum(its[0] for _, its in numbers.values())])}
        for engine_id in self._labels.series(list(numbers)):
            counts, sums = numbers.get(engine_id) or self._nothing()
            buckets = list(zip(names, accumulate(counts), strict=True))
            family.add_metric(self._labels.values(engine_id), buckets, sums[0])
        yield family
