"""Certificates for tests of TLS between machines."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import trustme

from quipu.actors.fleet.processes.link_tls import LinkTls


class Authority:
    """Signs certificates, and writes them to files."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self._folder = folder
        folder.mkdir()
        self._ca.cert_pem.write_to_path(folder / "ca.pem")

    def files(self, *names: str, **times: datetime) -> LinkTls:
        """Issue a certificate for a machine with these names and addresses; return its files."""
        issued = self._ca.issue_cert(*names, **times)
        name = "-".join([*names, *times])
        cert, key = self._folder / f"{name}.cert", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return LinkTls(str(cert), str(key), str(self._folder / "ca.pem"))
