"""Secrets of the object store tier: reading their files, and the keys that are derived from them.

Two files are possible, each with 32 random bytes: `--kv-remote-secret` separates deployments that use the same bucket,
`--kv-remote-encrypt` also encrypts. At least one is required, because without a secret everybody who can write to the
bucket could plant blocks, and everybody who can list it could tell from the names which prompts were computed.

What must always hold: whoever lacks one of the files that a server has can neither find nor open what it stores; errors
name a file and a flag, never contents. Only the standard library is needed here, because names are also computed where
nothing is stored.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import stat
from pathlib import Path

import attrs

from ...config.tier_settings import TIER_FLAGS

SECRET_FLAG = TIER_FLAGS["kv_remote_secret"]
ENCRYPT_FLAG = TIER_FLAGS["kv_remote_encrypt"]
KEY_BYTES = 32

_MAX_FILE_BYTES = 4096
_OPEN_TO_OTHERS = stat.S_IRWXO | stat.S_IWGRP
"""A group may read: secrets that Kubernetes mounts have its mode."""
_FEWEST_DISTINCT = 12
"""Different values among the 32 bytes: fewer are never seen in random ones."""
_HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")


@attrs.frozen
class RemoteKeys:
    """The keys of a deployment."""

    names: bytes = attrs.field(repr=False)
    """For the names of objects."""
    objects: bytes = attrs.field(repr=False)
    """For the objects: authenticates, and encrypts if `is_encrypted`."""
    is_encrypted: bool

    @classmethod
    def derive(cls, secret: bytes | None, encryption: bytes | None) -> RemoteKeys:
        """Derive keys by HKDF-SHA256 (RFC 5869) from whichever secrets there are.

        All keys depend on all secrets, so that servers that encrypt and servers that do not never meet in a bucket.
        """
        if secret is None and encryption is None:
            raise ValueError(f"--kv-remote needs {SECRET_FLAG} FILE or {ENCRYPT_FLAG} FILE")
        material = (b"" if secret is None else b"secret" + secret) + (
            b"" if encryption is None else b"encr" + encryption
        )
        extracted = hmac.digest(b"quipu kv blocks in an object store, v1", material, "sha256")
        return cls(_expanded(extracted, b"names"), _expanded(extracted, b"objects"), encryption is not None)


def _expanded(extracted: bytes, purpose: bytes) -> bytes:
    return hmac.digest(extracted, purpose + b"\x01", "sha256")


def read_remote_keys(secret_file: Path | None, encryption_file: Path | None) -> RemoteKeys:
    """Read the files that are given. Raises ValueError, which names the flag."""
    secret = None if secret_file is None else read_secret(secret_file, SECRET_FLAG)
    encryption = None if encryption_file is None else read_secret(encryption_file, ENCRYPT_FLAG)
    return RemoteKeys.derive(secret, encryption)


def read_secret(path: Path, flag: str) -> bytes:
    """Return the 32 bytes in a file: as they are, as 64 hexadecimal digits, or in base64.

    Raises ValueError, which names the flag and shows nothing of the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{flag}: {path} is not a regular file")
            if found.st_mode & _OPEN_TO_OTHERS:
                mode = stat.S_IMODE(found.st_mode)
                raise ValueError(f"{flag}: {path} is accessible to other users (mode {mode:04o}): chmod 600 {path}")
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"{flag}: cannot read {path}: {error.strerror}") from None
    secret = _decoded(content)
    if secret is None:
        wanted = "32 bytes, 64 hexadecimal digits, or base64 of 32 bytes (openssl rand -hex 32)"
        raise ValueError(f"{flag}: {path} must have {wanted}")
    if len(set(secret)) < _FEWEST_DISTINCT:
        raise ValueError(f"{flag}: the bytes in {path} are not random (openssl rand -hex 32)")
    return secret


def _decoded(content: bytes) -> bytes | None:
    """Return the 32 bytes that a file's content stands for, None if it stands for none."""
    if len(content) == KEY_BYTES and not _HEX_DIGITS.issuperset(content):  # else half as many random bits
        return content
    text = content.strip()
    try:
        if len(text) == 2 * KEY_BYTES:
            return binascii.unhexlify(text)
        secret = base64.b64decode(text.translate(bytes.maketrans(b"-_", b"+/")), validate=True)
    except ValueError:
        return None
    return secret if len(secret) == KEY_BYTES else None
