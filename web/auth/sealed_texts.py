"""Texts that clients keep for this server and cannot read: encrypted and authenticated for one tenant.

    sealed    base64url(version (1 byte), nonce (12 bytes), AES-256-GCM(text in UTF-8), tag (16 bytes))

The version and the tenant's name are the associated data. What must always hold: what is opened is a text that this key
has sealed for this tenant, unchanged; the key never leaves its file, which only its owner can read.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from pathlib import Path
from typing import Final

import attrs

from quipu.actors.shared.private_files import make_private, write_private_once

from .key_file import KeyFileError

KEY_NAME: Final = "compaction_key"
"""The file in the data directory."""
KEY_BYTES: Final = 32
MAX_TEXT_BYTES: Final = 1 << 17
"""Of one text, in UTF-8."""
_VERSION: Final = b"\x01"
_NONCE_BYTES, _TAG_BYTES = 12, 16
_MIN_BYTES: Final = len(_VERSION) + _NONCE_BYTES + _TAG_BYTES
MAX_SEALED_CHARS: Final = (_MIN_BYTES + MAX_TEXT_BYTES + 2) // 3 * 4
_PURPOSE: Final = b"quipu sealed text\x00"


class NotSealedHere(Exception):
    """What a client has sent is not a text that this server has sealed for its tenant."""


@attrs.frozen
class TextSeal:
    """Seals and opens texts. By default with a key that is lost with the process."""

    _key: bytes = attrs.field(factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False, alias="key")

    def of(self, tenant: str) -> TenantSeal:
        return TenantSeal(self, tenant)

    def seal(self, tenant: str, text: str) -> str:
        """Return a sealed text, of which at most `MAX_TEXT_BYTES` are kept."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        data = text.encode("utf-8", "replace")
        if len(data) > MAX_TEXT_BYTES:
            data = data[:MAX_TEXT_BYTES].decode("utf-8", "ignore").encode()
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = AESGCM(self._key).encrypt(nonce, data, _about(tenant))
        return base64.urlsafe_b64encode(_VERSION + nonce + sealed).decode()

    def open(self, tenant: str, sealed: str) -> str:
        """Return the text that was sealed for a tenant. Raises NotSealedHere."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if len(sealed) > MAX_SEALED_CHARS or not sealed.isascii():
            raise NotSealedHere
        try:
            data = base64.b64decode(sealed, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise NotSealedHere from None
        if len(data) < _MIN_BYTES or data[:1] != _VERSION:
            raise NotSealedHere
        nonce, rest = data[1 : 1 + _NONCE_BYTES], data[1 + _NONCE_BYTES :]
        try:
            return AESGCM(self._key).decrypt(nonce, rest, _about(tenant)).decode()
        except InvalidTag:
            raise NotSealedHere from None


@attrs.frozen
class TenantSeal:
    """Seals and opens the texts of one tenant."""

    _seal: TextSeal = attrs.field(alias="seal")
    _tenant: str = attrs.field(alias="tenant")

    def seal(self, text: str) -> str:
        return self._seal.seal(self._tenant, text)

    def open(self, sealed: str) -> str:
        """Return a text. Raises NotSealedHere."""
        return self._seal.open(self._tenant, sealed)


NOTHING_SEALED: Final = TextSeal().of("")
"""Opens nothing."""


def _about(tenant: str) -> bytes:
    return _PURPOSE + _VERSION + tenant.encode("utf-8", "surrogatepass")


def kept_seal(data_dir: Path) -> TextSeal:
    """Return the seal whose key is in the data directory; make it if there is none. Raises KeyFileError."""
    path = data_dir / KEY_NAME
    try:
        if not path.exists():
            write_private_once(path, secrets.token_bytes(KEY_BYTES))
        make_private(path)
        with path.open("rb") as file:
            key = file.read(KEY_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"cannot use the key in {path}: {error.strerror}") from None
    from cryptography.hazmat.primitives.ciphers import aead  # noqa: F401 - so that no request waits for the import

    if len(key) != KEY_BYTES:
        raise KeyFileError(f"{path} is not a key of {KEY_BYTES} bytes: restore or remove it")
    return TextSeal(key)
