"""The files in `deploy/`: what reads them accepts them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_ray_cluster_is_valid() -> None:
    """Ray's own schema accepts the description of a cluster, and refuses what it does not know."""
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("ray")
    from ray.autoscaler._private.util import prepare_config, validate_config

    cluster = prepare_config(yaml.safe_load((ROOT / "deploy" / "ray-cluster.yaml").read_text()))
    validate_config(cluster)
    with pytest.raises(Exception, match="made_up"):
        validate_config({**cluster, "made_up": 1})
