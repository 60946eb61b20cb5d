"""The cluster that the tests use: nodes can be added and removed."""

from __future__ import annotations

from tests.actors.fleet.cluster.ray_nodes import RayNodes
from tests.processes import eventually


def test_nodes_come_and_go(ray_cluster: RayNodes) -> None:
    """A node that is added is listed until it is removed, gracefully or not."""
    import ray

    def alive() -> set[str]:
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    with ray_cluster.connected():
        with ray_cluster.node() as first, ray_cluster.node() as second:
            eventually(lambda: alive() == {ray_cluster.head_id, first, second}, "no other node is listed any more")
            ray_cluster.remove_node(first, kill=True)
            ray_cluster.remove_node(second)
        eventually(lambda: alive() == {ray_cluster.head_id}, "only the head node is listed")
