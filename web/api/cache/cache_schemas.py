"""What is declared of the routes at `/v1/cache/`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from quipu.actors.config.declarations import EVERY_API, Bounds
from quipu.actors.messages.block_manager import MissReason
from quipu.actors.messages.explanations import AdviceCode, BlockSource
from quipu.actors.messages.tiers import CACHE_TIERS

from ..body_field import BOOLEAN, STRING, BodyField, kind, union
from ..body_table import SHAPES
from ..operation import (
    CACHE,
    COUNT,
    FLAG,
    NUMBER_VALUE,
    TEXT_VALUE,
    Named,
    Operation,
    always,
    array,
    by_name,
    maybe,
    one_of,
    record,
)
from ..usage_schemas import TIERS

PREFETCH: Final = "prefetch"
LOOKED_UP: Final = union(
    BodyField(name="url", type=STRING, help="The endpoint that would serve the request."),
    *(
        kind(
            endpoint,
            BodyField(name="body", inner=SHAPES[endpoint], is_required=True, help="As for that endpoint."),
            BodyField(name="method", schema={"const": "POST"}),
            BodyField(name="custom_id", help="As in a line of a batch file; not read."),
            BodyField(name=PREFETCH, type=BOOLEAN, help="Also begin to load blocks from lower tiers."),
        )
        for endpoint in EVERY_API
    ),
    name="CacheLookup",
    is_closed=True,
)
DEFAULT_LIMIT: Final = 100
MAX_LIMIT: Final = 1024
MAX_NODES: Final = 2000
DEFAULT_NODES: Final = 500
DEFAULT_DEPTH: Final = 4
MAX_DEPTH: Final = 1000
BRANCH_ID: Final = "[0-9a-f]{16}"
_REASON = one_of(*(reason.value for reason in MissReason))
_PLACE = {"message": maybe(COUNT), "part": maybe(COUNT)}
LOOKUP = Operation(
    summary="Look up how much of a prompt is cached",
    tag=CACHE,
    help="The request is written as a line of a batch file. It is not served, and not counted as used.",
    body=LOOKED_UP,
    answer=record(
        {
            "prompts": array(
                record(
                    {
                        "prompt_tokens": COUNT,
                        "cached_tokens": COUNT,
                        "cached_tokens_by_tier": maybe(TIERS),
                        "prefetching_tokens": COUNT,
                        "engine": maybe(COUNT),
                        "pinned_until": maybe(COUNT),
                        "ends_at": maybe(record({"token": COUNT, **_PLACE, "reason": _REASON})),
                    }
                )
            )
        }
    ),
)
_NUMBERS = {
    "prompt_tokens": maybe(COUNT),
    "cached_tokens": maybe(COUNT),
    "cached_tokens_by_tier": maybe(TIERS),
    "restored_tokens": maybe(COUNT),
    "recomputed_tokens": maybe(COUNT),
}
_BLOCK = record(
    {
        "start": COUNT,
        "end": COUNT,
        "source": one_of(*(source.value for source in BlockSource)),
        "tier": maybe(one_of(*(tier.value for tier in CACHE_TIERS))),
    }
)
_EVICTED = record({"at": NUMBER_VALUE, "by": maybe(TEXT_VALUE), "idle_s": maybe(NUMBER_VALUE)})
_ENDED = record(
    {
        "reason": _REASON,
        "token": COUNT,
        **_PLACE,
        "diverged_from": maybe(TEXT_VALUE),
        "evicted": maybe(_EVICTED),
    }
)
_ADVICE = record(
    {
        "code": one_of(*(code.value for code in AdviceCode)),
        "message": maybe(COUNT),
        "token": maybe(COUNT),
        "text": TEXT_VALUE,
    }
)
_EXPLAINED = record(
    {
        **_NUMBERS,
        "lost_to_rounding": maybe(COUNT),
        "blocks": array(_BLOCK),
        "messages": array(record({"index": maybe(COUNT), "role": TEXT_VALUE, "start": COUNT, "end": COUNT})),
        "ended": maybe(_ENDED),
        "advice": array(_ADVICE),
    }
)
EXPLAIN = Operation(
    summary="Explain why no more of a request's prompts was cached",
    tag=CACHE,
    path={"request_id": "From the response header `X-Quipu-Request-Id`."},
    answer=Named(
        "Explanation",
        record(
            {
                "request_id": TEXT_VALUE,
                "model": TEXT_VALUE,
                "adapter": maybe(TEXT_VALUE),
                "parent": maybe(TEXT_VALUE),
                "state": one_of("open", "closed"),
                "usage": record(_NUMBERS),
                "prompts": array(_EXPLAINED),
            }
        ),
    ),
    others={HTTPStatus.NOT_FOUND: "No record exists for this id, or it is another tenant's."},
)
_SHARE = maybe(NUMBER_VALUE)
_FIGURES = {
    "requests": COUNT,
    "hit_requests": COUNT,
    "prompt_tokens": COUNT,
    "cached_tokens": COUNT,
    "hit_rate": _SHARE,
    "series": array(
        record(
            {
                "start": NUMBER_VALUE,
                "end": NUMBER_VALUE,
                "requests": COUNT,
                "prompt_tokens": COUNT,
                "cached_tokens": COUNT,
                "hit_rate": NUMBER_VALUE,
            }
        )
    ),
    "infinite_cache": maybe(
        record(
            {
                "query_blocks": NUMBER_VALUE,
                "hit_blocks": NUMBER_VALUE,
                "hit_rate": NUMBER_VALUE,
                "blocks_for_hits": by_name(maybe(NUMBER_VALUE)),
                "sampled_share": NUMBER_VALUE,
            }
        )
    ),
    "evictions": maybe(record({"sampled": COUNT, "idle_s": by_name(maybe(NUMBER_VALUE))})),
    "pins": record({"prompts": COUNT, "tokens": COUNT}),
}
_TENANT_HELP = "Only of this tenant. A key without admin rights sees its own tenant only."
STATS = Operation(
    summary="Show how the prefix cache was used",
    tag=CACHE,
    help="By tenant and model, the most recently used first. `all`, `blocks` and `pinned` are for admin keys.",
    query=(
        BodyField(name="tenant", type=STRING, help=_TENANT_HELP),
        BodyField(name="model", type=STRING, help="Only of this model."),
        BodyField(
            name="limit", bounds=Bounds(minimum=1, maximum=MAX_LIMIT), default=DEFAULT_LIMIT, help="Rows of `data`."
        ),
    ),
    answer=Named(
        "CacheStats",
        record(
            {
                "object": always("cache.stats"),
                "window_s": NUMBER_VALUE,
                "block_size": COUNT,
                "data": array(
                    record({"tenant": TEXT_VALUE, "model": TEXT_VALUE, "parent": maybe(TEXT_VALUE), **_FIGURES})
                ),
                "has_more": FLAG,
            },
            {
                "all": record(_FIGURES),
                "blocks": record({"total": COUNT, "used": COUNT}),
                "pinned": record({"blocks": COUNT, "yielded": COUNT}),
            },
        ),
    ),
)
_NODE = record(
    {
        "id": TEXT_VALUE,
        "parent": maybe(TEXT_VALUE),
        "tenant": TEXT_VALUE,
        "start": COUNT,
        "tokens": COUNT,
        "cached_tokens": COUNT,
        "cached_tokens_by_tier": by_name(COUNT),
        "engines": by_name(COUNT),
        "tier": TEXT_VALUE,
        "requests": COUNT,
        "children": COUNT,
        "created_at": NUMBER_VALUE,
        "last_used_at": NUMBER_VALUE,
        "pinned_until": maybe(NUMBER_VALUE),
        "in_use": FLAG,
        "last_request": maybe(TEXT_VALUE),
        "diverged": maybe(record({"token": COUNT, "exact": FLAG, "role": maybe(TEXT_VALUE), **_PLACE})),
        "path_tokens": maybe(COUNT),
    }
)
TREE = Operation(
    summary="Show the prefix tree of the cached blocks",
    tag=CACHE,
    help="Without text and token ids. A node is a branch: blocks that the same prompts have.",
    query=(
        BodyField(name="tenant", type=STRING, help=_TENANT_HELP),
        BodyField(
            name="from", schema={"type": STRING, "pattern": f"^{BRANCH_ID}$"}, help="The branch whose children to show."
        ),
        BodyField(
            name="depth",
            bounds=Bounds(minimum=1, maximum=MAX_DEPTH),
            default=DEFAULT_DEPTH,
            help="Levels below the branch.",
        ),
        BodyField(name="limit", bounds=Bounds(minimum=1, maximum=MAX_NODES), default=DEFAULT_NODES, help="Nodes."),
        BodyField(name="request", type=STRING, help="The id of a request whose path to show."),
    ),
    answer=Named(
        "CacheTree",
        record(
            {
                "object": always("cache.tree"),
                "block_size": COUNT,
                "nodes": array(_NODE),
                "eviction_order": array(TEXT_VALUE),
                "has_more": FLAG,
            }
        ),
    ),
    others={HTTPStatus.NOT_FOUND: "There is no such branch or request."},
)
