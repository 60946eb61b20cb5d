"""Which client a request comes from, as far as that helps to choose one of several engines.

A client that names itself (`prompt_cache_key` or `user` of OpenAI's APIs, `metadata.user_id` of Anthropic's) is served
by the engine that served it last where engines are nearly as good as each other. The readers of each API call
`read_affinity_key`; the message to the tokenizer carries `affinity_of` it.

What must always hold: it is a hint, and neither part of a block key nor of any count; no value of one tenant has the
digest of another tenant's; the time it takes does not grow with the value.
"""

from __future__ import annotations

import hashlib

from .fields import Fields

MAX_AFFINITY_CHARS = 4096
"""Characters of a value that are looked at."""
_DIGEST_BYTES = 16
_PERSON = b"quipu affinity"


def read_affinity_key(fields: Fields, *names: str) -> str:
    """Return the first of these fields that is not empty, as far as it is looked at; an empty string if all are.

    Raises APIError for any of them that is not a string.
    """
    values = [fields.optional_text(name) for name in names]
    return next((value[:MAX_AFFINITY_CHARS] for value in values if value), "")


def affinity_of(domain: str, key: str) -> bytes:
    """Return the 16 bytes that stand for a client within its cache domain; none for an empty key."""
    if not key:
        return b""
    tenant = domain.encode()
    digest = hashlib.blake2b(b"%d:" % len(tenant), digest_size=_DIGEST_BYTES, person=_PERSON)
    digest.update(tenant)
    digest.update(key.encode())
    return digest.digest()
