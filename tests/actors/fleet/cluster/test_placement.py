"""What is set aside on a Ray cluster for each engine."""

from __future__ import annotations

import pytest

from quipu.actors.fleet.cluster.placement import default_resources


@pytest.mark.parametrize(
    ("cluster", "gpus_each", "expected"),
    [
        ({"CPU": 8.0}, 1, {"CPU": 1.0}),
        ({"CPU": 8.0}, 2, {"CPU": 1.0}),
        ({"CPU": 8.0, "GPU": 4.0}, 1, {"GPU": 1.0, "CPU": 0.0}),
        ({"CPU": 8.0, "GPU": 4.0}, 2, {"GPU": 2.0, "CPU": 0.0}),
    ],
)
def test_default_resources(cluster: dict[str, float], gpus_each: int, expected: dict[str, float]) -> None:
    """A GPU for each rank where there are GPUs, else a CPU."""
    assert default_resources(cluster, gpus_each) == expected
