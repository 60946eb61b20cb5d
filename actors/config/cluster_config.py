"""Where engines on other machines come from, and how they call back. Read by `fleet/cluster/`."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .declarations import setting

SHIP_FLAG = "--ray-ship-weights"
"""Named by the error where a node does not have the checkpoint."""


@attrs.frozen(kw_only=True)
class ClusterConfig:
    """How engines are placed on the nodes of a Ray cluster, and reached there."""

    model: str
    """The checkpoint as the operator named it, which nodes look for: a folder, a hub id, or `demo`."""
    address: str | None = setting(
        None,
        "--ray-address",
        reader="text",
        metavar="HOST:PORT",
        help="the Ray cluster to join",
        resolved="RAY_ADDRESS, else the cluster that runs on this machine, else one that is started here",
        group="cluster",
    )
    resources: Mapping[str, float] | None = setting(
        None,
        "--ray-resources",
        reader="resources",
        metavar="JSON",
        help="resources that Ray reserves for each engine",
        resolved='{"GPU": 1} if the cluster has GPUs, else {"CPU": 1}',
        group="cluster",
    )
    placement: str = setting(
        "spread",
        "--ray-placement",
        choices=("spread", "pack"),
        help="whether engines are spread over the nodes, or packed onto as few as possible",
        group="cluster",
    )
    ships_weights: bool = setting(
        False,
        SHIP_FLAG,
        help="copy the checkpoint to nodes that do not have it, once for each node",
        group="cluster",
    )
    link_address: str | None = setting(
        None,
        "--link-address",
        reader="text",
        metavar="HOST[:PORT]",
        help="address at which engines on other machines reach this server",
        resolved="the address by which Ray knows this machine, and any free port",
        group="cluster",
    )
    peer_ports: tuple[int, int] | None = setting(
        None,
        "--peer-ports",
        reader="ports",
        metavar="PORTS",
        help="ports at which engines on the nodes of a cluster await each other, such as 7600-7607: one for each "
        "engine of a node",
        resolved="any free port",
        group="cluster",
    )
    link_tls_cert: str | None = setting(
        None,
        "--link-tls-cert",
        reader="text",
        metavar="FILE",
        help="certificate that this server and its engines on other machines authenticate with, in PEM format, at "
        "the same path on each machine",
        group="cluster",
    )
    link_tls_key: str | None = setting(
        None, "--link-tls-key", reader="text", metavar="FILE", help="the certificate's key, likewise", group="cluster"
    )
    link_tls_ca: str | None = setting(
        None,
        "--link-tls-ca",
        reader="text",
        metavar="FILE",
        help="certificate of the authority that signed the certificates of all machines, likewise",
        group="cluster",
    )
