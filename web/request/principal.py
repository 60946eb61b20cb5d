"""On whose behalf a request is served. Made by `web/auth/` from the key that the request brought."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Principal:
    """On whose behalf a request is served."""

    tenant: str
    """Who pays. It is also the cache domain: what two tenants send is never shared."""
    key_id: str | None
    """None where the server was started without keys."""
    key_name: str | None
    is_admin: bool
    """May ask what concerns the whole server, and sees every tenant's records."""
    may_prioritize: bool = False
    """May name a `priority` of its own, whatever the server allows everybody."""
