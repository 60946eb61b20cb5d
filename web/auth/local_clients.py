"""Which addresses are loopback addresses, and which requests came from this machine without a proxy.

Used by a server without keys, where the path of a request is all that is known about its sender.
"""

from __future__ import annotations

import ipaddress
from typing import Any, cast

from quart import request


def is_loopback(address: str) -> bool:
    """Return whether an address, or a name to listen on, is reachable only from this machine."""
    if address.lower() == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def is_from_this_machine() -> bool:
    """Return whether the current request was sent from this machine and not forwarded by a proxy."""
    client = cast(dict[str, Any], request.scope).get("client")
    return client is not None and is_loopback(client[0]) and not any(map(_is_proxy_header, request.headers.keys()))


def _is_proxy_header(header: str) -> bool:
    name = header.lower()
    return name == "forwarded" or name.startswith("x-forwarded-")
