"""Trap: the fields of a block's key are joined without tags, and a salt chosen by a client imitates another field.

In another server a salt with an adapter's name hit that adapter's blocks: wrong KV, of another client. Here every field
is tagged and length-prefixed.
"""

from __future__ import annotations

from itertools import combinations

import trio

from quipu.actors.shared.block_keys import root_key
from tests.runtimes import full_blocks, small_runtime
from tests.traps.wire import prompt_of, settle

TEXT = "tenant:7:model=demo-lora"


def test_fields_cannot_be_shifted() -> None:
    """The same characters, split differently between the fields, never make the same key."""
    keys = set()
    cuts = list(combinations(range(len(TEXT) + 1), 3))
    for first, second, third in cuts:
        domain, model, kv_dtype, kv_layout = TEXT[:first], TEXT[first:second], TEXT[second:third], TEXT[third:]
        keys.add(root_key(domain=domain, model=model, kv_dtype=kv_dtype, kv_layout=kv_layout, block_size=16))
    assert len(keys) == len(cuts)


def test_salt_with_the_name_of_an_adapter() -> None:
    """A client's salt is not an adapter or a domain, nor part of either."""
    fields = {"model": "m", "kv_dtype": "k", "kv_layout": "l", "block_size": 16}
    keys = {
        root_key(**fields, domain="tenant", adapter="lora"),
        root_key(**fields, domain="tenant", salt="lora"),
        root_key(**fields, domain="tenantlora"),
        root_key(**fields, domain="tenant", salt="lo", adapter="ra"),
        root_key(**fields, domain="tenant", salt="7:adapter=4:lora"),
        root_key(**fields, domain="", salt="tenant", adapter="lora"),
    }
    assert len(keys) == 6


def test_numbers_are_fields_too() -> None:
    """Digits cannot move from one number to its neighbour."""
    fields = {"domain": "d", "model": "m", "kv_dtype": "k"}
    keys = {
        root_key(**fields, kv_layout="l", block_size=16, group_id=1),
        root_key(**fields, kv_layout="l", block_size=1, group_id=61),
        root_key(**fields, kv_layout="l1", block_size=6, group_id=1),
        root_key(**fields, kv_layout="l1", block_size=61, group_id=0),
    }
    assert len(keys) == 4


async def test_domain_that_imitates_another_field(autojump_clock: trio.abc.Clock) -> None:
    """A tenant whose name spells out the following field of the key hits nothing of the imitated tenant."""
    prompt = prompt_of(50)
    async with small_runtime() as client:
        await client.ask(prompt, domain="tenant")
        for domain in ("", "tenantdemo", "tenant5:model=4:demo", "6:domain=6:tenant", "tenant\0"):
            assert (await client.ask(prompt, domain=domain)).record.cached_tokens == 0, domain
        assert (await client.ask(prompt, domain="tenant")).record.cached_tokens == full_blocks(50)
        await settle(client)
