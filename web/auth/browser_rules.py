"""Which hosts and origins a server serves: the rules, the parsing of their flags, and the comparison of names.

`browsers.py` applies the rules to every request. This module imports no web server, since the command line parses its
flags with it.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
from urllib.parse import urlsplit

import attrs

ANY = "*"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/\[\]@]+)(?::([0-9]*))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


@attrs.frozen(kw_only=True)
class BrowserRules:
    """The allowed hosts and origins. By default nothing is checked."""

    allowed_hosts: frozenset[str] | None = None
    """Allowed values of `Host` besides loopback names, each with a port or for every port. None: any value."""
    allowed_origins: frozenset[str] = frozenset()
    """Origins of other sites that may send requests and read the responses."""
    refuse_cross_site: bool = False
    """Refuse requests from all other sites."""

    @property
    def refuses_others(self) -> bool:
        """Whether there are sites whose pages are refused."""
        return self.refuse_cross_site and ANY not in self.allowed_origins

    def allows_host(self, host: str) -> bool:
        if self.allowed_hosts is None or ANY in self.allowed_hosts:
            return True
        found = _HOST.fullmatch(host.lower())
        return found is not None and (
            found[1].endswith(".localhost")
            or is_loopback(found[1].strip("[]"))
            or not self.allowed_hosts.isdisjoint((found[1], host.lower()))
        )

    def allows_origin(self, origin: str) -> bool:
        return ANY in self.allowed_origins or origin.lower() in self.allowed_origins


def is_same_origin(origin: str, host: str) -> bool:
    """Return whether a page of this origin came from this host. (A proxy that terminates TLS may change the scheme.)"""
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return False
    found, asked = _HOST.fullmatch(parts.netloc), _HOST.fullmatch(host.lower())
    if found is None or asked is None or parts.scheme not in _DEFAULT_PORTS:
        return False
    default = _DEFAULT_PORTS[parts.scheme]
    return (found[1], found[2] or default) == (asked[1], asked[2] or default)


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


def parse_origins(text: str) -> frozenset[str]:
    """Parse a JSON list, as in vLLM. Raises ArgumentTypeError."""
    try:
        origins = json.loads(text)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) and origin for origin in origins):
        example = """'["https://site.example"]'"""
        raise argparse.ArgumentTypeError(f"invalid JSON list of origins {text!r} (for example {example})")
    return frozenset(origin.lower().rstrip("/") for origin in origins)


def parse_hosts(text: str) -> list[str]:
    """Parse a comma-separated list of host names, each with or without a port. Raises ArgumentTypeError."""
    hosts = [host.strip().lower() for host in text.split(",")]
    for host in hosts:
        if host != ANY and not _HOST.fullmatch(host):
            raise argparse.ArgumentTypeError(f"invalid host {host!r} (for example quipu.example or quipu.example:8000)")
    return hosts
