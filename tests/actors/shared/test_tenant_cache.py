"""A cache in which each tenant has its own entries."""

from __future__ import annotations

import random

from quipu.actors.shared.tenant_cache import TenantCache


def test_entries_are_a_tenants_own() -> None:
    """A tenant does not find another's entries; the same key may have another value for each."""
    cache: TenantCache[str, int] = TenantCache(4)
    cache.put("a", "k", 1)
    assert cache.get("b", "k") is None
    cache.put("b", "k", 2)
    assert (cache.get("a", "k"), cache.get("b", "k"), cache.pop("a", "k"), cache.get("a", "k")) == (1, 2, 1, None)
    assert cache.pop("a", "k") is None and len(cache) == 1


def test_who_has_most_loses_the_least_recently_used() -> None:
    """When the cache is full, the tenant with the most entries loses its least recently used one; others lose none."""
    cache: TenantCache[int, int] = TenantCache(4)
    cache.put("few", 0, 0)
    for key in range(3):
        assert cache.put("many", key, key) is None
    cache.get("many", 0)
    assert cache.put("many", 3, 3) == 1
    assert cache.get("few", 0) == 0 and cache.get("many", 0) == 0 and cache.get("many", 1) is None


def test_size_is_counted() -> None:
    """The size is the number of entries that can be found, and never exceeds the limit."""
    cache, rng = TenantCache[int, int](7), random.Random(1)
    for _ in range(3000):
        tenant, key = rng.choice("abc"), rng.randrange(6)
        if rng.random() < 0.3:
            cache.pop(tenant, key)
        else:
            cache.put(tenant, key, key)
        assert len(cache) == sum(cache.get(name, one) is not None for name in "abc" for one in range(6)) <= 7
