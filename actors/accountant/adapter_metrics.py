"""Which adapters are served, for `metrics.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..request_desk.adapters import Adapter


class AdapterInfo(Collector):
    """One series for each name of an adapter, with its digest; the value is 1. Looked up when metrics are read."""

    def __init__(self, model_name: str, look_up: Callable[[], Mapping[str, Adapter]]) -> None:
        """`look_up` returns the adapters by name. `model_name` is their parent."""
        self._model = model_name
        self._look_up = look_up

    def collect(self) -> Iterator[Metric]:
        text = "Adapters that are served, with the digest of their bytes."
        family = GaugeMetricFamily("quipu:adapter_info", text, labels=["model_name", "adapter", "digest"])
        for name, adapter in self._look_up().items():
            family.add_metric([self._model, name, adapter.digest], 1)
        yield family
