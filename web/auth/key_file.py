"""The key file: one entry per key, with the key's hash and never the key.

TOML (`[[keys]]` tables), or JSON (`{"keys": [...]}`) if the file's name ends in `.json`. Read at startup and on SIGHUP;
`web/cli/keys.py` prints new entries for it.

What must always hold: a file is accepted as a whole or not at all. Errors name an entry and a field, never the value:
somebody may have put a key where its hash belongs.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from quipu.actors.shared.bounded_toml import parse_toml

PREFIX = "sk-quipu-"
ADMIN_PREFIX = "sk-quipu-admin-"
MAX_NAME_CHARS = 128

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA256_OF_NOTHING = hashlib.sha256(b"").hexdigest()


class KeyFileError(Exception):
    """Keys cannot be used. The message names the entry and the field, and may be logged."""


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One key, as in the file."""

    id: str
    """Identifies the key in logs and in the ledger."""
    name: str
    """For humans."""
    tenant: str
    """Who pays, and whose cache its requests share."""
    sha256: str
    admin: bool = False
    priority: bool = False
    """Its requests may set a `priority`."""
    adapters: tuple[str, ...] | None = None
    """Names of the adapters that its requests may use. None: all."""


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def new_key(*, admin: bool) -> str:
    """Return a new key: 256 random bits after a prefix that humans and secret scanners recognize."""
    return (ADMIN_PREFIX if admin else PREFIX) + secrets.token_urlsafe(32)


def read_key_file(path: Path) -> list[KeyEntry]:
    """Return every entry of a file. Raises KeyFileError."""
    try:
        text = path.read_bytes().decode()
        content: Any = msgspec.json.decode(text) if path.suffix == ".json" else parse_toml(text)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeyFileError(f"{path} is not UTF-8 text") from None
    except RecursionError:
        raise KeyFileError(f"{path} is nested too deeply") from None
    except ValueError as error:  # from either parser, and for numbers that are too long
        raise KeyFileError(f"{path}: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("keys"), list):
        raise KeyFileError(f"{path}: a list `keys` is required")
    if unknown := sorted(content.keys() - {"keys"}):
        raise KeyFileError(f"{path}: unknown field `{unknown[0]}` beside `keys`")
    try:
        return [_read_entry(raw, index) for index, raw in enumerate(content["keys"])]
    except KeyFileError as error:
        raise KeyFileError(f"{path}: {error}") from None


def _read_entry(raw: Any, index: int) -> KeyEntry:
    entry_id = raw.get("id") if isinstance(raw, dict) else None
    where = f"keys[{index}]" + (f" ({entry_id})" if isinstance(entry_id, str) and _LABEL.fullmatch(entry_id) else "")
    try:
        entry = msgspec.convert(raw, KeyEntry)
    except msgspec.ValidationError as error:
        raise KeyFileError(f"{where}: {str(error).replace('`$.', '`')}") from None
    entry = msgspec.structs.replace(entry, sha256=entry.sha256.lower())
    check_entry(entry, where)
    return entry


def check_entry(entry: KeyEntry, where: str) -> None:
    """Check what the types do not express. Raises KeyFileError."""
    for field, value in (("id", entry.id), ("tenant", entry.tenant)):
        if not _LABEL.fullmatch(value):
            rule = "1 to 128 of the characters A-Z a-z 0-9 . _ : @ / -, the first a letter or a digit"
            raise KeyFileError(f"{where}: `{field}` must be {rule}")
    if not (0 < len(entry.name) <= MAX_NAME_CHARS and entry.name.isprintable()):
        raise KeyFileError(f"{where}: `name` must be 1 to {MAX_NAME_CHARS} printable characters")
    if not _SHA256.fullmatch(entry.sha256):
        length = len(entry.sha256)
        raise KeyFileError(f"{where}: `sha256` must be 64 hexadecimal digits; it has {length} characters")
    if entry.sha256 == _SHA256_OF_NOTHING:
        raise KeyFileError(f"{where}: `sha256` is the hash of the empty string")


def check_distinct(entries: Sequence[KeyEntry]) -> None:
    """Raise KeyFileError if two entries have the same id or the same key."""
    ids: set[str] = set()
    owners: dict[str, str] = {}
    for entry in entries:
        if entry.id in ids:
            raise KeyFileError(f"duplicate `id` {entry.id}")
        ids.add(entry.id)
        other = owners.setdefault(entry.sha256, entry.id)
        if other != entry.id:
            raise KeyFileError(f"`sha256` of {entry.id} is also that of {other}: a key cannot have two owners")


def render_entry(entry: KeyEntry) -> str:
    """Return an entry as TOML."""
    # A JSON string is a TOML string as long as nothing is escaped as surrogates.
    given = {name: value for name, value in msgspec.structs.asdict(entry).items() if value is not None}
    fields = {name: msgspec.json.encode(value).decode() for name, value in given.items()}
    return "[[keys]]\n" + "".join(f"{name} = {value}\n" for name, value in fields.items())
