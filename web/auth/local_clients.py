"""Which addresses are this machine's own, and which requests came from it without a proxy between.

Used where a server has no keys: then the way by which a request came is all that is known of who sent it.
"""

from __future__ import annotations

import ipaddress
from typing import Any, cast

from quart import request


def is_loopback(address: str) -> bool:
    """Whether an address, or a name to listen on, is reachable from this machine alone."""
    if address.lower() == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def is_from_this_machine() -> bool:
    """Whether the current request was sent from here. What a proxy has forwarded came from somewhere else."""
    client = cast(dict[str, Any], request.scope).get("client")
    return client is not None and is_loopback(client[0]) and not any(map(_tells_of_a_proxy, request.headers.keys()))


def _tells_of_a_proxy(header: str) -> bool:
    name = header.lower()
    return name == "forwarded" or name.startswith("x-forwarded-")
