"""Trap: a client's salt is used to separate tenants, and one tenant sends another's salt.

In other servers whoever knew a salt hit the blocks behind it, and the count revealed what another client had sent. Here
the domain comes from the authenticated tenant; a salt only subdivides it.
"""

from __future__ import annotations

import trio

from tests.runtimes import full_blocks, small_runtime
from tests.traps.wire import prompt_of, settle


async def test_salt_of_another_tenant(autojump_clock: trio.abc.Clock) -> None:
    """The same prompt with the same salt misses from another tenant and hits from the same one."""
    prompt = prompt_of(50)
    async with small_runtime() as client:
        assert (await client.ask(prompt, domain="a", cache_salt="secret")).record.cached_tokens == 0
        assert (await client.ask(prompt, domain="b", cache_salt="secret")).record.cached_tokens == 0
        assert (await client.ask(prompt, domain="a", cache_salt="secret")).record.cached_tokens == full_blocks(50)
        assert (await client.ask(prompt, domain="a")).record.cached_tokens == 0, "it subdivides its own tenant's cache"
        await settle(client)
