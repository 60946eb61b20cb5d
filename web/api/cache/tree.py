"""`GET /v1/cache/tree`: the prefix tree of the cached blocks, without text and token ids.

`tenant` chooses a tenant (an admin key sees all), `from` a branch whose children are wanted, `depth` the levels below
it, `limit` the nodes, `request` a request whose path is shown. A node is a branch: blocks that the same prompts have.

What must always hold: at most `MAX_NODES` nodes and `MAX_BYTES` bytes are answered; other tasks run every few nodes,
however many clients ask, and tenants take turns; no engine is asked; another tenant's branch or request is answered
like one that does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

import attrs
import orjson
import trio
from quart import Response, request
from quart_trio import QuartTrio

from quipu.actors.cache_insight.cache_figures import Divergence, HeldBlocks, TreeNode, UnknownBranch, UnknownRequest
from quipu.actors.messages.tiers import CACHE_TIERS, Tier
from quipu.actors.request_desk.interface import Desk

from ...http.turns import FairTurns
from ...request.errors import bad_value, not_found
from ...request.request_context import current_request_context
from ..operation import route
from ..query import Parameters
from .cache_schemas import BRANCH_ID, DEFAULT_DEPTH, DEFAULT_NODES, MAX_DEPTH, MAX_NODES, TREE

MAX_BYTES: Final = 1 << 20
NODES_AT_A_TIME: Final = 32
PAUSE_S: Final = 0.001
"""After each group of nodes, for an engine on the same processor."""
_BRANCH_ID = re.compile(BRANCH_ID)
_BYTES_AROUND: Final = 4096
"""Of everything but nodes."""
_BYTES_OF_ORDER: Final = 20
"""Of a node's place in the order of eviction, and a comma."""


@attrs.define
class Found:
    nodes: list[TreeNode] = attrs.field(factory=list)
    fragments: list[orjson.Fragment] = attrs.field(factory=list)
    """The same as JSON."""
    num_bytes: int = _BYTES_AROUND
    has_more: bool = False

    def take(self, nodes: Iterator[TreeNode | None], limit: int) -> bool:
        """Add the next nodes, within the limits. Return whether to continue."""
        slice_of_nodes = list(islice(nodes, NODES_AT_A_TIME))
        for node in slice_of_nodes:
            if node is None:
                continue
            data = orjson.dumps(describe(node))
            self.num_bytes += len(data) + _BYTES_OF_ORDER
            if len(self.nodes) == limit or self.num_bytes > MAX_BYTES:
                self.has_more = True
                return False
            self.nodes.append(node)
            self.fragments.append(orjson.Fragment(data))
        return len(slice_of_nodes) == NODES_AT_A_TIME


def install_cache_tree(app: QuartTrio, desk: Desk) -> None:
    """Register the route."""
    slices = FairTurns()

    @route(app, "GET /v1/cache/tree", TREE)
    async def cache_tree() -> Response:
        principal, parameters = current_request_context().principal, Parameters(request.args)
        tenant, branch_id = parameters.text("tenant"), parameters.text("from")
        depth = parameters.whole("depth", 1, MAX_DEPTH) or DEFAULT_DEPTH
        limit = parameters.whole("limit", 1, MAX_NODES) or DEFAULT_NODES
        request_id = parameters.text("request")
        if branch_id is not None and not _BRANCH_ID.fullmatch(branch_id):
            raise bad_value("from", "must be the id of a node")
        if not principal.is_admin:
            tenant = principal.tenant if tenant in (None, principal.tenant) else ""  # nobody's name
        try:
            nodes = desk.cache.tree(tenant, branch_id, depth, request_id)
        except UnknownBranch:
            raise not_found("There is no such branch in the cache.", "from", "branch_not_found") from None
        except UnknownRequest:
            raise not_found("The path of this request is not known.", "request", "request_not_found") from None
        found = Found()
        while True:
            async with slices.turn(principal.party):
                if not found.take(nodes, limit):
                    break
            await trio.sleep(PAUSE_S)
        async with slices.turn(principal.party):
            described = {
                "object": "cache.tree",
                "block_size": desk.cache.block_size,
                "nodes": found.fragments,
                "eviction_order": eviction_order(found.nodes),
                "has_more": found.has_more,
            }
            return Response(orjson.dumps(described), content_type="application/json")


def eviction_order(nodes: Sequence[TreeNode]) -> list[str]:
    """Return the ids of nodes that are not held, pinned or gone, in the order of their eviction.

    From the object store nothing is evicted.
    """
    free = [node for node in nodes if _is_an_engines(node) and not node.is_held and node.pinned_until_s is None]
    # a sequence lets go of its blocks last to first
    free.sort(key=lambda node: (node.last_release, -node.start))
    return [node.branch_id for node in free]


def _is_an_engines(node: TreeNode) -> bool:
    """Return whether any engine has some of a node in a tier of its own."""
    return any(_num_own(held) for held in node.engines.values())


def _num_own(held: HeldBlocks) -> int:
    return held.num - held.lowered.get(Tier.REMOTE, 0)


def describe(node: TreeNode) -> dict[str, Any]:
    """Return a node, with the tiers of the engine that finds most of it; of several, the one that has most itself."""
    most = max(node.engines.values(), key=lambda held: (held.num, _num_own(held)), default=HeldBlocks(0))
    by_tier = {tier.value: most.lowered.get(tier, 0) for tier in CACHE_TIERS}
    by_tier[Tier.DEVICE] = most.num - sum(most.lowered.values())
    return {
        "id": node.branch_id,
        "parent": node.parent_id,
        "tenant": node.tenant,
        "start": node.start,
        "tokens": node.num_tokens,
        "cached_tokens": most.num,
        "cached_tokens_by_tier": by_tier,
        "engines": {str(engine_id): held.num for engine_id, held in node.engines.items()},
        "tier": max(by_tier, key=by_tier.__getitem__),  # of those that have as much, the fastest
        "requests": node.num_requests,
        "children": node.num_children,
        "created_at": round(node.made_s, 3),
        "last_used_at": round(node.used_s, 3),
        "pinned_until": None if node.pinned_until_s is None else round(node.pinned_until_s, 3),
        "in_use": node.is_held,
        "last_request": node.last_request_id,
        "diverged": None if node.diverged is None else describe_divergence(node.diverged),
        "path_tokens": node.path_tokens,
    }


def describe_divergence(diverged: Divergence) -> dict[str, Any]:
    """Return where a branch begins to differ from those beside it."""
    return {
        "token": diverged.token,
        "exact": diverged.is_exact,
        "role": diverged.role,
        "message": diverged.message,
        "part": diverged.part,
    }
