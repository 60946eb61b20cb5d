"""The keys that sign receipts: Ed25519, in the data directory. Used by `receipts.py` and `receipt_checking.py`.

    DATA_DIR/receipt_key.pem          signs; made when the first receipt is asked for
    DATA_DIR/receipt_key.NAME.pem     an earlier one, renamed by the operator: still published, signs nothing

A public key is shown as a JSON Web Key (RFC 8037), and its id is its thumbprint (RFC 7638). `cryptography` is imported
where a key is used: the server does not need it to start.

What must always hold: the private key never leaves its file, which only its owner can read; of processes that make the
key at the same time, all use the same one.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import orjson

from ..shared.private_files import make_private, write_private_once
from .database import LedgerError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_NAME: Final = "receipt_key.pem"
_EARLIER: Final = "receipt_key.*.pem"
MAX_KEY_BYTES: Final = 4096
MAX_KEYS: Final = 100
PUBLIC_KEY_BYTES: Final = 32


@attrs.frozen
class PublicKey:
    """A key that checks signatures: its 32 bytes."""

    raw: bytes

    @property
    def jwk(self) -> dict[str, str]:
        """The key as a JSON Web Key."""
        return {**self._named(), "use": "sig", "alg": "EdDSA", "kid": self.key_id}

    @property
    def key_id(self) -> str:
        """The key's thumbprint."""
        named = orjson.dumps(self._named(), option=orjson.OPT_SORT_KEYS)
        return to_base64url(hashlib.sha256(named).digest())

    def _named(self) -> dict[str, str]:
        return {"crv": "Ed25519", "kty": "OKP", "x": to_base64url(self.raw)}

    @classmethod
    def from_jwk(cls, jwk: Any) -> PublicKey:
        """Read a JSON Web Key. Raises ValueError."""
        if not isinstance(jwk, dict) or jwk.get("kty") != "OKP" or jwk.get("crv") != "Ed25519":
            raise ValueError("not an Ed25519 key")
        raw = from_base64url(jwk.get("x"))
        if len(raw) != PUBLIC_KEY_BYTES:
            raise ValueError(f"an Ed25519 key has {PUBLIC_KEY_BYTES} bytes, not {len(raw)}")
        return cls(raw)

    def signed(self, signature: bytes, data: bytes) -> bool:
        """Return whether `signature` is this key's, of `data`."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, data)
        except (InvalidSignature, ValueError):
            return False
        return True


@attrs.frozen
class SigningKey:
    """The key that signs, and the secret that salts are derived from."""

    public: PublicKey
    salt_secret: bytes = attrs.field(repr=False)
    _private: Ed25519PrivateKey = attrs.field(repr=False, alias="private")

    def sign(self, data: bytes) -> bytes:
        return self._private.sign(data)


def signing_key(data_dir: Path) -> SigningKey:
    """Return the key that signs; make it if there is none. Raises LedgerError and OSError."""
    path = data_dir / KEY_NAME
    if not path.exists():
        _make_key(path)
    make_private(path)
    return _read_key(path)


def existing_keys(data_dir: Path) -> list[SigningKey]:
    """Return the key that signs, if there is one, and then the earlier ones. Raises LedgerError and OSError."""
    paths = [path for path in (data_dir / KEY_NAME,) if path.exists()]
    paths += sorted(data_dir.glob(_EARLIER))[:MAX_KEYS]
    return [_read_key(path) for path in paths]


def key_set(keys: Iterable[PublicKey]) -> dict[str, Any]:
    """Return keys as a JSON Web Key Set (RFC 7517)."""
    return {"keys": [key.jwk for key in keys]}


def read_key_set(data: bytes) -> list[PublicKey]:
    """Read a JSON Web Key Set, or one key. Raises ValueError."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    keys = found.get("keys", [found]) if isinstance(found, dict) else None
    if not isinstance(keys, list):
        raise ValueError("not a JSON Web Key Set")
    return [PublicKey.from_jwk(jwk) for jwk in keys]


def to_base64url(data: bytes) -> str:
    """Encode as RFC 7515 does: URL-safe, without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_base64url(text: object) -> bytes:
    """Decode what `to_base64url` encodes. Raises ValueError."""
    if not isinstance(text, str) or not text.isascii():
        raise ValueError("not base64url text")
    padded = text + "=" * (-len(text) % 4)
    return base64.b64decode(padded.encode(), altchars=b"-_", validate=True)


def _make_key(path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_private_once(path, pem)


def _read_key(path: Path) -> SigningKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    with path.open("rb") as file:
        pem = file.read(MAX_KEY_BYTES)
    try:
        private = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise LedgerError(f"{path.name} is not a private key in PEM: {type(error).__name__}") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise LedgerError(f"{path.name} is not an Ed25519 key")
    salt_secret = hashlib.sha256(b"quipu receipt salts\x00" + private.private_bytes_raw()).digest()
    return SigningKey(PublicKey(private.public_key().public_bytes_raw()), salt_secret, private)
