"""Where engines are placed: what Ray sets aside for each of them, in placement groups.

Used by `ray_driver.py`. The engines with which the server starts share one group, so that they are spread or packed.
One that is added later takes a free place in it, or gets a group of its own. Free places in the shared group stay set
aside for this server. When a node dies, Ray moves its places.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs

POLL_S = 1.0
"""How often a wait for a node checks whether the engine is still wanted."""
ID_CHARACTERS = 8


@attrs.frozen
class Place:
    """One bundle of a placement group."""

    group: Any
    index: int


class Placement:
    def __init__(self, ray: Any, resources: dict[str, float], strategy: str, num_engines: int) -> None:
        """`resources` are set aside for each engine."""
        self._ray = ray
        self.resources = resources
        self._strategy = strategy.upper()
        self._lock = threading.Lock()
        self._shared = self._make_group(num_engines)
        self._free = [Place(self._shared, index) for index in reversed(range(num_engines))]
        self._taken: dict[int, Place] = {}

    def wait(self, engine_id: int, check: Callable[[], object]) -> tuple[dict[str, Any], int]:
        """Wait until an engine's place is on a node, and return options for its actor, and how many engines are there.

        `check` is called now and then, and may raise.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        while not (place := self._place_of(engine_id)).group.wait(timeout_seconds=POLL_S):
            check()
        rest = {name: amount for name, amount in self.resources.items() if name not in ("CPU", "GPU", "memory")}
        options = {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            "resources": rest,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place.group, place.index),
        }
        if "memory" in self.resources:
            options["memory"] = self.resources["memory"]
        nodes = self._nodes()
        return options, max(1, list(nodes.values()).count(nodes[engine_id]))

    def node_of(self, engine_id: int) -> str:
        """Return the address of an engine's node, and how its id begins."""
        node_id = self._nodes().get(engine_id, "")
        names = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        return f"{names.get(node_id, 'unknown')} ({node_id[:ID_CHARACTERS]})"

    def forget(self, engine_id: int) -> None:
        with self._lock:
            place = self._taken.pop(engine_id, None)
            if place is None:
                return
            if place.group is self._shared:
                self._free.append(place)
                return
        self._ray.util.remove_placement_group(place.group)

    def _place_of(self, engine_id: int) -> Place:
        with self._lock:
            place = self._taken.get(engine_id)
            if place is None:
                place = self._free.pop() if self._free else Place(self._make_group(1), 0)
            elif self._free and place.group is not self._shared and not place.group.wait(timeout_seconds=0):
                # while it waited for a node, another place was freed
                self._ray.util.remove_placement_group(place.group)
                place = self._free.pop()
            self._taken[engine_id] = place
            return place

    def _make_group(self, num_engines: int) -> Any:
        return self._ray.util.placement_group([dict(self.resources)] * num_engines, strategy=self._strategy)

    def _nodes(self) -> dict[int, str]:
        """Return the node of each engine that has one."""
        with self._lock:
            taken = dict(self._taken)
        tables: dict[Any, dict[int, str]] = {}
        for place in taken.values():
            if place.group.id not in tables:
                table = self._ray.util.placement_group_table(place.group)
                tables[place.group.id] = table.get("bundles_to_node_id", {})
        return {engine_id: tables[place.group.id].get(place.index, "") for engine_id, place in taken.items()}


def default_resources(cluster: dict[str, float], gpus_each: int) -> dict[str, float]:
    """Return what to reserve for an engine whose needs were not configured: GPUs if the cluster has any, else a CPU."""
    return {"GPU": float(gpus_each), "CPU": 0.0} if cluster.get("GPU", 0) >= 1 else {"CPU": 1.0}
