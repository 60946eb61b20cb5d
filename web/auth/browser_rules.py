"""Which hosts and origins a server answers: the rules, their flags' values, and how names are compared.

Made by `quipu serve` from its flags, asked by `browsers.py` for every request. A module without a web server in it: the
command line reads its flags with it.
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
    """By default nothing is checked."""

    allowed_hosts: frozenset[str] | None = None
    """What `Host` may say beside the names of loopback, with a port or for every port; None: whatever it says."""
    allowed_origins: frozenset[str] = frozenset()
    """Of other sites, that may ask and read the answers."""
    refuse_cross_site: bool = False
    """What comes from any site but those is refused."""

    @property
    def refuses_others(self) -> bool:
        """There are sites whose pages may not ask."""
        return self.refuse_cross_site and ANY not in self.allowed_origins

    def allows_host(self, host: str) -> bool:
        if self.allowed_hosts is None or ANY in self.allowed_hosts:
            return True
        found = _HOST.fullmatch(host.lower())
        return found is not None and (
            _is_loopback_name(found[1]) or not self.allowed_hosts.isdisjoint((found[1], host.lower()))
        )

    def allows_origin(self, origin: str) -> bool:
        return ANY in self.allowed_origins or origin.lower() in self.allowed_origins


def is_same_origin(origin: str, host: str) -> bool:
    """Whether a page of this origin came from this host. (A proxy that speaks TLS may have changed the scheme.)"""
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return False
    found, asked = _HOST.fullmatch(parts.netloc), _HOST.fullmatch(host.lower())
    if found is None or asked is None or parts.scheme not in _DEFAULT_PORTS:
        return False
    default = _DEFAULT_PORTS[parts.scheme]
    return (found[1], found[2] or default) == (asked[1], asked[2] or default)


def _is_loopback_name(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return ip.is_loopback


def parse_origins(text: str) -> frozenset[str]:
    """A JSON list, as vLLM takes it. Raises ArgumentTypeError."""
    try:
        origins = json.loads(text)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) and origin for origin in origins):
        raise argparse.ArgumentTypeError(f"""{text!r} is no JSON list of origins, such as '["https://site.example"]'""")
    return frozenset(origin.lower().rstrip("/") for origin in origins)


def parse_hosts(text: str) -> list[str]:
    """Names with commas between, each with a port or without. Raises ArgumentTypeError."""
    hosts = [host.strip().lower() for host in text.split(",")]
    for host in hosts:
        if host != ANY and not _HOST.fullmatch(host):
            raise argparse.ArgumentTypeError(f"{host!r} is no host, such as quipu.example or quipu.example:8000")
    return hosts
