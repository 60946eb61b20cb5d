"""Who a request came from, as the ledger needs it: tenant and key, the client's own ids, the digest that marks a retry.

What must always hold: an id chosen by a client is an alias or a digest, never a key of ours; two requests share an
idempotency digest only if tenant, key, endpoint and body are the same, byte for byte.
"""

from __future__ import annotations

import hashlib

from quart import request

from quipu.actors.messages.accountant import Caller
from quipu.actors.threads import run_in_thread

from ..request.errors import bad_value
from ..request.request_context import RequestContext

HEADER = "Idempotency-Key"
MAX_IDEMPOTENCY_KEY_CHARS = 255
_INLINE_BYTES = 256 * 1024
"""A body up to this size is hashed on the event loop."""


async def caller_of(
    context: RequestContext,
    raw_body: bytes | bytearray,
    model: str,
    adapter: str | None = None,
    parent: str | None = None,
) -> Caller:
    """Return the caller of the current request; `adapter` and `parent` are as in `Caller`.

    Raises APIError for an idempotency key that cannot be stored.
    """
    principal, key = context.principal, request.headers.get(HEADER)
    if key is not None and not (0 < len(key) <= MAX_IDEMPOTENCY_KEY_CHARS and key.isascii() and key.isprintable()):
        raise bad_value(HEADER, f"must be 1 to {MAX_IDEMPOTENCY_KEY_CHARS} printable ASCII characters")
    digest = None
    if key is not None:
        parts = (principal.tenant, key, context.endpoint, raw_body)
        digest = _digest(*parts) if len(raw_body) <= _INLINE_BYTES else await run_in_thread(_digest, *parts)
    return Caller(
        tenant=principal.tenant,
        key_id=principal.key_id,
        model=model,
        adapter=adapter,
        parent=parent,
        client_request_id=context.client_request_id,
        idempotency_key=key,
        idempotency_digest=digest,
        batch_id=None if context.line is None else context.line.batch_id,
    )


def _digest(tenant: str, key: str, endpoint: str, raw_body: bytes | bytearray) -> str:
    digest = hashlib.sha256(b"quipu-retry-1")
    for part in (tenant.encode(), key.encode(), endpoint.encode(), raw_body):
        digest.update(b"%d:" % len(part))
        digest.update(part)  # releases the interpreter lock for a long part
    return digest.hexdigest()
