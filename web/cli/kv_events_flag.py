"""`--kv-events-config`: vLLM's flag, with vLLM's field names, parsed into a `KvEventsConfig`.

An unknown or invalid field is refused by name.
"""

from __future__ import annotations

import argparse
import ipaddress
from typing import Annotated, Literal

import msgspec

from quipu.actors.config.engine_config import KvEventsConfig

Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31 - 1)]
"""ZeroMQ stores its limits in a C int."""


class Flag(msgspec.Struct, forbid_unknown_fields=True):
    """The flag as written. Fields that are not documented here are as in `KvEventsConfig`."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = KvEventsConfig().endpoint
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: Count = KvEventsConfig().buffer_steps
    hwm: Count = KvEventsConfig().hwm
    max_queue_size: Count = KvEventsConfig().max_queue_size
    bind: bool | None = None
    """Not in vLLM: whether `endpoint` is bound, if the address alone does not tell."""


def parse_kv_events(text: str) -> KvEventsConfig | None:
    """Return the flag's value, None if it disables publishing. Raises ArgumentTypeError."""
    try:
        flag = msgspec.json.decode(text, type=Flag)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for name, endpoint in (("endpoint", flag.endpoint), ("replay_endpoint", flag.replay_endpoint)):
        if endpoint is not None:
            _check_endpoint(name, endpoint)
    if flag.endpoint == flag.replay_endpoint and not flag.endpoint.endswith(":*"):
        raise argparse.ArgumentTypeError(f"`endpoint` and `replay_endpoint` are the same: {flag.endpoint}")
    if not flag.enable_kv_cache_events or flag.publisher == "null":
        return None
    fields = msgspec.structs.asdict(flag)
    for name in ("enable_kv_cache_events", "publisher", "bind"):
        del fields[name]
    return KvEventsConfig(binds=_is_ours(flag.endpoint) if flag.bind is None else flag.bind, **fields)


def _check_endpoint(name: str, endpoint: str) -> None:
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("tcp", "ipc") or not address:
        raise argparse.ArgumentTypeError(f"`{name}` must be tcp://HOST:PORT or ipc://PATH, not {endpoint!r}")
    host, _, port = address.rpartition(":")
    if scheme == "tcp" and not (host and (port == "*" or (port.isdecimal() and int(port) < 65536))):
        raise argparse.ArgumentTypeError(f"`{name}` needs a host and a port, tcp://HOST:PORT, not {endpoint!r}")


def _is_ours(endpoint: str) -> bool:
    """Return whether to bind an address: a wildcard, a file, or this machine. Any other is a subscriber's.

    This is vLLM's rule, except for loopback addresses, to which vLLM connects.
    """
    if endpoint.startswith("ipc://") or "*" in endpoint or "::" in endpoint:
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
