"""Who a request belongs to. Created by `web/auth/` from the key that the request carries."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Principal:
    """On whose behalf a request is served."""

    tenant: str
    """Who pays. Also the cache domain: nothing is shared between two tenants."""
    key_id: str | None
    """None if the server has no keys."""
    key_name: str | None
    is_admin: bool
    """May use admin routes, and see every tenant's records."""
    may_prioritize: bool = False
    """May set a `priority`, whether or not the server allows everybody to."""

    adapters: frozenset[str] | None = None
    """Names of the adapters that it may use. None: all."""

    @property
    def party(self) -> tuple[str, bool]:
        """As whom it takes turns: a tenant's clients never keep its administrators waiting."""
        return self.tenant, self.is_admin
