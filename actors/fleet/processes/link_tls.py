"""TLS on the connections between a web process and engines on other machines.

`link_port.py` and `tcp_way.py` secure a connection here before its handshake (`link_handshake.py`). Each machine has
its own three files at the same paths: a certificate, its key, and the authority that must have signed the other side's.

What must always hold: TLS 1.3 and nothing older; each side has a certificate of that authority, and that of the web
process also has the name or address that the engine has called; closing a stream never waits for the other side.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import attrs
import trio

from ...config.cluster_config import ClusterConfig
from ...config.declarations import settings_of
from ...shared.checkpoint import CheckpointError
from .link_handshake import Impostor

_FLAGS = {setting.attribute: setting.flags[0] for setting in settings_of(ClusterConfig)}
CERT_FLAG, KEY_FLAG, CA_FLAG = _FLAGS["link_tls_cert"], _FLAGS["link_tls_key"], _FLAGS["link_tls_ca"]
_CERTIFICATE, _KEY, _ENCRYPTED = "-----BEGIN CERTIFICATE-----", "PRIVATE KEY-----", "ENCRYPTED"
_MAX_ROUNDS = 8
"""Of messages in a handshake with oneself, which needs three."""


@attrs.frozen
class LinkTls:
    """The files of one machine."""

    cert: str
    key: str
    ca: str

    def check(self) -> None:
        """Raise CheckpointError if a connection with oneself would fail: it names the flag at fault."""
        _check_file(CERT_FLAG, self.cert, _CERTIFICATE)
        _check_file(KEY_FLAG, self.key, _KEY)
        _check_file(CA_FLAG, self.ca, _CERTIFICATE)
        host, engine = self.host_context(), self.engine_context()
        engine.check_hostname = False  # no one was called
        try:
            _shake_hands(host, engine)
        except ssl.SSLError as error:
            authority = f"the authority in {CA_FLAG} {self.ca}"
            raise CheckpointError(f"{CERT_FLAG} {self.cert}: {reason_of(error)} (by {authority})") from error

    def host_context(self) -> ssl.SSLContext:
        """Return the context of the web process. Raises CheckpointError."""
        context = self._fill(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.num_tickets = 0  # every connection is proved anew
        return context

    def engine_context(self) -> ssl.SSLContext:
        """Return the context of an engine, which also checks whom it has called. Raises CheckpointError."""
        return self._fill(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _fill(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        _load(CA_FLAG, self.ca, lambda: context.load_verify_locations(self.ca))
        load = partial(context.load_cert_chain, self.cert, self.key, password=lambda: b"")  # else it asks the terminal
        _load(KEY_FLAG, f"{self.key} with {CERT_FLAG} {self.cert}", load)
        return context


def tls_of(config: ClusterConfig) -> LinkTls | None:
    """Return the files of the link, None if it is not secured. Raises CheckpointError if some are missing."""
    files = {CERT_FLAG: config.link_tls_cert, KEY_FLAG: config.link_tls_key, CA_FLAG: config.link_tls_ca}
    given = {flag: name for flag, name in files.items() if name}
    if given and len(given) < len(files):
        missing = " and ".join(flag for flag in files if flag not in given)
        raise CheckpointError(f"{next(iter(given))} needs {missing}, too")
    return LinkTls(*given.values()) if given else None


class TlsStream(trio.abc.AsyncResource):
    """A secured connection, with what hosts and engines use of a `trio.SocketStream`."""

    def __init__(self, below: trio.SocketStream, context: ssl.SSLContext, called: str | None) -> None:
        """`called` is the name or address by which the other side was called; None on the side that was called."""
        self._below = below
        # compatible with HTTPS: the end of the connection is the end of the stream, and `aclose` tells nobody
        self._stream = trio.SSLStream(
            below, context, server_hostname=called, server_side=called is None, https_compatible=True
        )

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket below: what is shut down or closed there is abrupt."""
        return self._below.socket

    async def shake_hands(self) -> None:
        """Raises Impostor if the other side is not trusted, or does not trust this one, or does not speak TLS."""
        try:
            await self._stream.do_handshake()
        except trio.BrokenResourceError as error:
            raise Impostor(fault_of(error) or "it went away before TLS was agreed upon") from error

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


async def secure(stream: trio.SocketStream, context: ssl.SSLContext | None, called: str | None) -> trio.SocketStream:
    """Agree upon TLS, where there is a context, and return the stream to use. Raises Impostor."""
    if context is None:
        return stream
    secured = TlsStream(stream, context, called)
    await secured.shake_hands()
    return cast(trio.SocketStream, secured)  # that class is final


def fault_of(error: BaseException) -> str | None:
    """Return what TLS has found wrong with a connection; None if it is broken for another reason."""
    return f"TLS: {reason_of(error.__cause__)}" if isinstance(error.__cause__, ssl.SSLError) else None


def reason_of(error: ssl.SSLError) -> str:
    """Return OpenSSL's own words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return str(error.reason or error).replace("_", " ").lower()


def _check_file(flag: str, name: str, marker: str) -> None:
    try:
        text = Path(name).read_text("utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(f"{flag}: cannot read {name}: {error.strerror}") from error
    if marker not in text:
        kind = "certificate" if marker is _CERTIFICATE else "private key"
        raise CheckpointError(f"{flag}: {name} has no {kind} in PEM form")
    if flag == KEY_FLAG and _ENCRYPTED in text:
        raise CheckpointError(f"{flag}: {name} is encrypted, and nobody could be asked for its password")


def _load(flag: str, what: str, load: Callable[[], object]) -> None:
    try:
        load()
    except OSError as error:
        reason = reason_of(error) if isinstance(error, ssl.SSLError) else error.strerror
        raise CheckpointError(f"{flag} {what}: {reason}") from error


def _shake_hands(host: ssl.SSLContext, engine: ssl.SSLContext) -> None:
    """Connect two contexts in memory. Raises SSLError if they refuse each other."""
    to_host, to_engine = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [engine.wrap_bio(to_engine, to_host), host.wrap_bio(to_host, to_engine, server_side=True)]
    for _ in range(_MAX_ROUNDS):
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)
        if not sides:
            return
