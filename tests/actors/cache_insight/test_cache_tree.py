"""The prefix tree after whole requests, through every actor, on the KV-reading fake executor, matches the pools."""

from __future__ import annotations

import itertools
import random

import pytest
import trio

from quipu.actors.cache_insight.cache_figures import Divergence, TreeNode
from quipu.actors.shared.block_keys import chain_keys
from quipu.actors.tokenizer.submission import root_key_of
from quipu.web.api.cache.tree import eviction_order
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Client, small_runtime
from tests.several_engines import engines, parametrize
from tests.traps.wire import over_http
from tests.web.api.anthropic.messages_api import PATH

__all__ = ["engines"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, two_engines=True, several_tokens=True)


def nodes_of(client: Client) -> list[TreeNode]:
    return [node for node in client.runtime.desk.cache.tree(depth=1000) if node is not None]


async def test_prompts_and_their_outputs(autojump_clock: trio.abc.Clock) -> None:
    """A conversation and a prompt that diverges from it make three branches, whichever engines have them."""
    prompt = prompt_of(4 * BLOCK)
    turn = prompt + continuation(prompt, 2 * BLOCK) + prompt_of(BLOCK, seed=1)
    other = prompt[: 3 * BLOCK] + prompt_of(3 * BLOCK + 2, seed=2)
    async with small_runtime() as client:
        await client.ask(prompt, max_tokens=2 * BLOCK)
        await client.ask(turn, max_tokens=1)
        await client.ask(other, max_tokens=1)
        top, *below = nodes_of(client)
        client.assert_at_rest()
    assert (top.start, top.num_tokens, top.num_requests, top.num_children) == (0, 3 * BLOCK, 3, 2)
    assert top.parent_id is None and max(held.num for held in top.engines.values()) == top.num_tokens
    assert sorted((node.start, node.num_tokens, node.num_requests) for node in below if node.start == 3 * BLOCK) == [
        (3 * BLOCK, 2 * BLOCK, 2),
        (3 * BLOCK, 3 * BLOCK, 1),
    ]
    assert not any(node.is_held or node.pinned_until_s for node in (top, *below))
    ids = {node.branch_id for node in (top, *below)}
    assert all(node.parent_id in ids for node in below)


@pytest.mark.parametrize("order_seed", [5, 6])
async def test_tree_is_what_the_pool_holds(order_seed: int, autojump_clock: trio.abc.Clock) -> None:
    """After random prompts and evictions the tree shows exactly the cached blocks that a prompt can find, and leaves
    are evicted in the order in which it lists them.

    With one of the two seeds the pool also holds blocks that cannot be found until those before them are computed
    again.
    """
    rng = random.Random(order_seed)
    texts: list[list[int]] = []
    async with small_runtime(num_engines=1, num_blocks=40) as client:
        for number in range(60):
            seed = rng.randrange(6)
            prompt = prompt_of(3 * BLOCK, seed=seed) + prompt_of(rng.randrange(1, 4) * BLOCK, seed=100 + number % 9)
            num_outputs = rng.choice([1, BLOCK + 1, BLOCK + 2])  # a block is filled in the last step, or before it
            await client.ask(prompt, max_tokens=num_outputs)
            texts.append(prompt + continuation(prompt, num_outputs))
        pool = client.engine.block_manager.pool.state()
        nodes = nodes_of(client)
        held = {key[:8].hex() for key in pool.keys if key is not None}
        place = {key[:8].hex(): pool.queue[::-1].index(block) for block, key in enumerate(pool.keys) if key is not None}
        root_key = root_key_of(client.encode([1]), client.config)
        client.assert_at_rest()
    found: set[str] = set()
    for text in texts:
        chain = [key[:8].hex() for key in chain_keys(root_key, text, BLOCK)]
        found |= set(itertools.takewhile(held.__contains__, chain))
    assert (len(found) < len(held)) == (order_seed == 6)
    assert sum(max(held.num for held in node.engines.values()) for node in nodes) == len(found) * BLOCK
    assert {node.branch_id for node in nodes} <= found
    order = eviction_order(nodes)
    assert len(order) == len(nodes) > 5
    assert order == sorted(order, key=lambda branch_id: -place[branch_id])


async def test_running_and_pinned(autojump_clock: trio.abc.Clock) -> None:
    """Branches that a running request uses are held, pinned ones have an expiry, and neither are in the eviction
    order."""
    system = {"type": "text", "text": "The cords are counted. " * 20, "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": "what? " * 40}]
    async with small_runtime() as client:
        _, answer = await over_http(client).post(
            PATH, {"model": "demo", "max_tokens": 2, "system": [system], "messages": messages}
        )
        top, rest = nodes_of(client)
        ticket = client.open(prompt_of(5 * BLOCK), max_tokens=400)
        await ticket.start()
        nodes = nodes_of(client)
        while not any(node.is_held for node in nodes):
            await trio.sleep(0.01)
            nodes = nodes_of(client)
        ticket.leave()
        await trio.sleep(1)
        later = nodes_of(client)
        client.runtime.desk.reset_prefix_cache()
        await client.ask(prompt_of(5), max_tokens=1)
        assert nodes_of(client) == []
    assert top.num_tokens == answer["usage"]["cache_creation_input_tokens"]
    assert top.pinned_until_s is not None and 290 < top.pinned_until_s - top.used_s <= 300
    assert rest.pinned_until_s is None and rest.parent_id == top.branch_id
    assert top.branch_id not in eviction_order(nodes) and rest.branch_id in eviction_order(nodes)
    assert not any(node.is_held for node in later)


async def test_what_diverged(autojump_clock: trio.abc.Clock) -> None:
    """A branch names the message in which its prompt diverges, and the exact token if the engine reported it; a
    request's path has the tokens of its prompt."""
    system = {"role": "system", "content": "The cords are counted. " * 12}
    async with small_runtime(num_engines=1) as client:
        http = over_http(client)
        for question in ("one " * 40, "two " * 40):
            messages = [system, {"role": "user", "content": question}]
            await http.post("/v1/chat/completions", {"model": "demo", "messages": messages, "max_tokens": BLOCK * 2})
        top, *below = nodes_of(client)
        second = below[0].last_request_id if below[0].used_s > below[1].used_s else below[1].last_request_id
        assert second is not None and top.last_request_id == second
        found = client.runtime.desk.explain(second, None)
        path = [n for n in client.runtime.desk.cache.tree(depth=1, request_id=second) if n is not None]
    assert found is not None and found.prompts[0].ended is not None
    assert top.diverged is not None and (top.diverged.token, top.diverged.message) == (0, 0)
    parts = {node.last_request_id: node.diverged for node in below if node.parent_id == top.branch_id}
    token = found.prompts[0].ended.miss.token
    assert parts[second] == Divergence(token, is_exact=True, role="user", message=1, part=None)
    assert len(parts) == 2
    (other,) = (part for request_id, part in parts.items() if request_id != second)
    assert other is not None and (other.token, other.is_exact) == (top.num_tokens, False)
    num_tokens = found.prompts[0].prompt_tokens
    assert num_tokens is not None
    assert sum(node.path_tokens for node in path) == num_tokens // BLOCK * BLOCK
