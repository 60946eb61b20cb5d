"""The keys of this server, and whose key a request carries.

The command line creates a `KeyStore` from its flags and reloads it on SIGHUP; `auth.py` looks keys up in it.

What must always hold: a plain key exists only until it is hashed; no key and no hash reaches a log, an error or a
response. If keys are configured, nobody gets in without one, even if the key file lists none.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from ..request.principal import Principal
from .key_file import KeyEntry, check_distinct, read_key_file

DEFAULT_TENANT = "default"


def runtime_principal(tenant: str = DEFAULT_TENANT) -> Principal:
    """Return the principal of every request to a server without keys."""
    return Principal(tenant=tenant, key_id=None, key_name=None, is_admin=True)


@attrs.frozen
class _Holder:
    digest: bytes
    principal: Principal


class KeyRing:
    """An immutable set of keys. Raises KeyFileError if two of them contradict each other."""

    def __init__(self, entries: Sequence[KeyEntry]) -> None:
        check_distinct(entries)
        self._secret = secrets.token_bytes(32)
        self._holders: dict[bytes, _Holder] = {}
        self._by_id = {entry.id: entry for entry in entries}
        for entry in entries:
            principal = Principal(
                tenant=entry.tenant,
                key_id=entry.id,
                key_name=entry.name,
                is_admin=entry.admin,
                may_prioritize=entry.priority,
                adapters=None if entry.adapters is None else frozenset(entry.adapters),
            )
            digest = bytes.fromhex(entry.sha256)
            self._holders[self._place(digest)] = _Holder(digest, principal)
        self.num_keys = len(entries)
        self.num_admin_keys = sum(entry.admin for entry in entries)

    def find(self, key: str) -> Principal | None:
        digest = hashlib.sha256(key.encode()).digest()
        holder = self._holders.get(self._place(digest))
        if holder is None or not hmac.compare_digest(holder.digest, digest):
            return None
        return holder.principal

    def holder(self, key_id: str | None, tenant: str) -> Principal | None:
        """Return the principal of a key by its id, if the key still exists and is this tenant's."""
        entry = None if key_id is None else self._by_id.get(key_id)
        if entry is None or entry.tenant != tenant:
            return None
        return self._holders[self._place(bytes.fromhex(entry.sha256))].principal

    def names(self, key_ids: Iterable[str], asker: Principal) -> dict[str, str]:
        """Return the names of known keys that `asker` may see, by id."""
        known = [self._by_id[key_id] for key_id in key_ids if key_id in self._by_id]
        return {entry.id: entry.name for entry in known if asker.is_admin or entry.tenant == asker.tenant}

    def _place(self, digest: bytes) -> bytes:
        # The time of a lookup depends on how much of its name matches. Names are keyed by a secret, so that it says
        # nothing about how close a guess came to a digest.
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()


class KeyStore:
    """The current keys: those given at startup, and those of a file that may change. Raises KeyFileError."""

    def __init__(self, given: Sequence[KeyEntry] = (), path: Path | None = None) -> None:
        self._given = tuple(given)
        self.path = path
        self.is_stale = False
        """The file is to be read again as soon as that is possible."""
        self.ring = self._read()

    @property
    def is_open(self) -> bool:
        """Whether no keys are configured. (With a key file that lists none, every request is refused.)"""
        return not self._given and self.path is None

    def reload(self) -> None:
        """Read the file again and use its keys. Raises KeyFileError, and then keeps the old ones."""
        self.is_stale = False
        self.ring = self._read()

    def describe(self) -> dict[str, object]:
        return {
            "num_keys": self.ring.num_keys,
            "num_admin_keys": self.ring.num_admin_keys,
            "key_file": None if self.path is None else str(self.path),
        }

    def _read(self) -> KeyRing:
        return KeyRing([*self._given, *(read_key_file(self.path) if self.path is not None else ())])


def given_keys(key_hashes: Sequence[str], admin_key_hashes: Sequence[str]) -> list[KeyEntry]:
    """Return entries for keys from flags or the environment: the default tenant's, numbered in the given order."""
    entries = []
    for kind, hashes, admin in (("api-key", key_hashes, False), ("admin-key", admin_key_hashes, True)):
        for number, sha256 in enumerate(hashes, 1):
            name = f"{kind}-{number}"
            entries.append(KeyEntry(id=name, name=name, tenant=DEFAULT_TENANT, sha256=sha256, admin=admin))
    return entries
