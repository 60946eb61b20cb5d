"""The files in `deploy/`: what reads them accepts them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_ray_cluster_is_valid() -> None:
    """Ray's own schema accepts the description of a cluster, before and after Ray has completed it."""
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("ray")
    from ray.autoscaler._private.util import prepare_config, validate_config

    cluster = yaml.safe_load((ROOT / "deploy" / "ray-cluster.yaml").read_text())
    validate_config(cluster)
    complete = prepare_config(cluster)
    validate_config(complete)
    assert complete["provider"]["worker_ips"] == ["10.0.0.2", "10.0.0.3"]
