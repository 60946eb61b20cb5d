"""Names of objects: PREFIX/v1/NUMERICS/XX/NAME, from which nobody without the deployment's secret learns anything.

NAME has 128 bits of an HMAC-SHA256 of the numerics and the block's chain key, which identifies tokens, tenant, salt,
model and adapter. XX is its first byte: object stores divide their load by prefixes. NUMERICS is an HMAC, too, so that
a listing returns only blocks that this server can use.

What must always hold: servers with the same secret, weights and numerics name a block alike, any others differently; a
path that was not made here is recognized as such, whoever wrote it.
"""

from __future__ import annotations

import hmac
import re

from .remote_keys import RemoteKeys

NAME_BYTES = 16
"""Of a digest, in a name. The rest is in the object."""
_FOLDER_BYTES = 8


class BlockNames:
    """The names of blocks that were computed with certain numerics."""

    def __init__(self, keys: RemoteKeys, numerics: str) -> None:
        folder = hmac.digest(keys.names, b"folder\0" + numerics.encode(), "sha256")[:_FOLDER_BYTES].hex()
        self.folder = f"v1/{folder}"
        """Path of the folder that contains all of them."""
        self._digests = hmac.new(keys.names, b"block\0" + numerics.encode() + b"\0", "sha256")
        self._paths = re.compile(rf"v1/{folder}/([0-9a-f]{{2}})/(\1[0-9a-f]{{{2 * NAME_BYTES - 2}}})", re.ASCII)

    def digest_of(self, key: bytes) -> bytes:
        """Return the digest (32 bytes) of a chain key."""
        digest = self._digests.copy()
        digest.update(key)
        return digest.digest()

    def name_of(self, key: bytes) -> bytes:
        """Return the part of a digest that names the object."""
        return self.digest_of(key)[:NAME_BYTES]

    def path_of(self, name: bytes) -> str:
        digits = name[:NAME_BYTES].hex()
        return f"{self.folder}/{digits[:2]}/{digits}"

    def name_in(self, path: str) -> bytes | None:
        """Return the name in a path, None if it is not one of these."""
        found = self._paths.fullmatch(path)
        return None if found is None else bytes.fromhex(found[2])
