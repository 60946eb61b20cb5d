"""Trap: a salt that a client names is taken for the wall between tenants, and one tenant names another's salt.

Elsewhere whoever knew a salt hit the blocks behind it, and the count told what somebody else had sent. Here the domain
comes from whom the server serves; a salt only subdivides it.
"""

from __future__ import annotations

import trio

from tests.runtimes import small_runtime
from tests.traps.wire import prompt_of, settle


async def test_another_tenant_s_salt_opens_nothing(autojump_clock: trio.abc.Clock) -> None:
    """The same prompt with the same salt, from another tenant, misses; from the same tenant it hits."""
    prompt = prompt_of(50)
    async with small_runtime() as client:
        assert (await client.ask(prompt, domain="a", cache_salt="secret")).record.cached_tokens == 0
        assert (await client.ask(prompt, domain="b", cache_salt="secret")).record.cached_tokens == 0
        assert (await client.ask(prompt, domain="a", cache_salt="secret")).record.cached_tokens == 48
        assert (await client.ask(prompt, domain="a")).record.cached_tokens == 0, "it subdivides its own tenant's cache"
        await settle(client)
