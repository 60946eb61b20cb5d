"""Who may ask: whose key a request brought, and the keys that this server knows.

The command line makes a `KeyStore` from its flags and has it reload on SIGHUP; `web/auth/auth.py` asks it, and hangs
the `Principal` that it finds on the context.

What must always hold: a plain key lives only while it is hashed; no key and no hash reaches a log, an error or an
answer. Where keys were asked for, nobody gets in without one, also when the file lists none.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from pathlib import Path

import attrs

from ..request.principal import Principal
from .key_file import KeyEntry, check_distinct, read_key_file

DEFAULT_TENANT = "default"


def runtime_principal(tenant: str = DEFAULT_TENANT) -> Principal:
    """Everybody, where the server was started without keys. What they may not ask from elsewhere is in `auth.py`."""
    return Principal(tenant=tenant, key_id=None, key_name=None, is_admin=True)


@attrs.frozen
class _Holder:
    digest: bytes
    principal: Principal


class KeyRing:
    """One generation of keys; never changes. Raises KeyFileError where two of them contradict each other."""

    def __init__(self, entries: Sequence[KeyEntry]) -> None:
        check_distinct(entries)
        self._secret = secrets.token_bytes(32)
        self._holders: dict[bytes, _Holder] = {}
        for entry in entries:
            principal = Principal(
                tenant=entry.tenant,
                key_id=entry.id,
                key_name=entry.name,
                is_admin=entry.admin,
                may_prioritize=entry.priority,
            )
            digest = bytes.fromhex(entry.sha256)
            self._holders[self._place(digest)] = _Holder(digest, principal)
        self.num_keys = len(entries)
        self.num_admin_keys = sum(entry.admin for entry in entries)

    def find(self, key: str) -> Principal | None:
        """The owner of a key."""
        digest = hashlib.sha256(key.encode()).digest()
        holder = self._holders.get(self._place(digest))
        if holder is None or not hmac.compare_digest(holder.digest, digest):
            return None
        return holder.principal

    def _place(self, digest: bytes) -> bytes:
        # A look-up takes a little longer the more of its name is right. So the names are scrambled with a secret of
        # this ring: how near a guess came to one of them says nothing about how near it came to a digest.
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()


class KeyStore:
    """The keys that hold now: those given at the start, and those of a file that may change.

    Raises KeyFileError.
    """

    def __init__(self, given: Sequence[KeyEntry] = (), path: Path | None = None) -> None:
        self._given = tuple(given)
        self.path = path
        self.ring = self._read()

    @property
    def is_open(self) -> bool:
        """No keys were asked for. (A file that lists none asks for keys that nobody has.)"""
        return not self._given and self.path is None

    def reload(self) -> None:
        """Read the file again; from then on its keys hold. Raises KeyFileError, and then the old ones still do."""
        self.ring = self._read()

    def describe(self) -> dict[str, object]:
        """What an operator may be shown."""
        return {
            "num_keys": self.ring.num_keys,
            "num_admin_keys": self.ring.num_admin_keys,
            "key_file": None if self.path is None else str(self.path),
        }

    def _read(self) -> KeyRing:
        return KeyRing([*self._given, *(read_key_file(self.path) if self.path is not None else ())])


def given_keys(key_hashes: Sequence[str], admin_key_hashes: Sequence[str]) -> list[KeyEntry]:
    """Entries for keys that came by flag or environment: the default tenant's, named in the order they were given."""
    entries = []
    for kind, hashes, admin in (("api-key", key_hashes, False), ("admin-key", admin_key_hashes, True)):
        for number, sha256 in enumerate(hashes, 1):
            name = f"{kind}-{number}"
            entries.append(KeyEntry(id=name, name=name, tenant=DEFAULT_TENANT, sha256=sha256, admin=admin))
    return entries
