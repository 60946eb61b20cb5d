"""Random request bodies made of each endpoint's own fields: most of them valid, some nearly, some not at all.

Hypothesis strategies, used by the fuzz tests (`tests/faults/test_random_bodies.py`) and by `python -m bench.stalls
--fuzz`. The fields of each endpoint are in `generation_bodies.py` and `other_bodies.py`, and what they are made of in
`body_fields.py`, `history_bodies.py`, `grammar_bodies.py` and `body_parts.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from bench import generation_bodies, other_bodies
from bench.body_fields import MAX_TOKENS
from bench.body_parts import (
    CHAT,
    COHERE_RERANK,
    COMPACT,
    COMPLETIONS,
    CONVERSATIONS,
    COUNT,
    DETOKENIZE,
    EMBEDDINGS,
    GENERATE,
    INFILL,
    INPUT_TOKENS,
    JUNK,
    LLAMA,
    LOAD,
    LOOKUP,
    MESSAGES,
    MODEL,
    RENDER,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    TOKENS,
    UNLOAD,
    mostly,
)
from bench.grammar_bodies import GRAMMARS

REQUIRED: Mapping[str, Mapping[str, Strategy[Any]]] = {**generation_bodies.REQUIRED, **other_bodies.REQUIRED}
OPTIONAL: Mapping[str, Mapping[str, Strategy[Any]]] = {**generation_bodies.OPTIONAL, **other_bodies.OPTIONAL}
LIMIT = {
    LLAMA: "n_predict",
    INFILL: "n_predict",
    COMPLETIONS: "max_tokens",
    CHAT: "max_tokens",
    RESPONSES: "max_output_tokens",
    MESSAGES: "max_tokens",
}
SAME_BODIES = {INPUT_TOKENS: RESPONSES, RENDER: CHAT, COHERE_RERANK: RERANK}
"""Endpoints that read what others read."""


@st.composite
def bodies(draw: st.DrawFn, endpoint: str) -> bytes:
    """Draw the body of one request."""
    if endpoint in SAME_BODIES:
        return draw(bodies(SAME_BODIES[endpoint]))
    if endpoint == LOOKUP:
        url = draw(st.sampled_from([url for url in LIMIT if url not in (LLAMA, INFILL)]))
        told = draw(mostly(st.just(url), JUNK))
        prefetch = draw(
            st.sampled_from([b"", b', "prefetch": true', b', "prefetch": %b' % json.dumps(draw(JUNK)).encode()])
        )
        return b'{"url": %b, "body": %b%b}' % (json.dumps(told).encode(), draw(bodies(url)), prefetch)
    body: dict[str, Any] = {"model": MODEL}
    if endpoint in LIMIT:
        body[LIMIT[endpoint]] = draw(MAX_TOKENS)
    optional = OPTIONAL[endpoint]
    names = draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True))
    for name, value in {**REQUIRED[endpoint], **{name: optional[name] for name in names}}.items():
        body[name] = draw(mostly(value, JUNK))
    if endpoint == GENERATE and draw(st.booleans()):
        del body["text"]
        body["input_ids"] = draw(mostly(TOKENS | st.lists(TOKENS, min_size=1, max_size=3), JUNK))
    if endpoint in GRAMMARS and draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(sorted(GRAMMARS[endpoint])))
        body[name] = draw(mostly(GRAMMARS[endpoint][name], JUNK))
    if draw(st.integers(0, 30)) == 0:
        body[draw(st.text(max_size=10))] = draw(JUNK)
    data = json.dumps(body, ensure_ascii=True).encode()
    if draw(st.integers(0, 40)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 3)) :]
    return data


ENDPOINTS = (
    COMPLETIONS,
    CHAT,
    RESPONSES,
    MESSAGES,
    COUNT,
    INPUT_TOKENS,
    COMPACT,
    CONVERSATIONS,
    LOOKUP,
    LOAD,
    UNLOAD,
    TOKENIZE,
    DETOKENIZE,
    RENDER,
    GENERATE,
    LLAMA,
    INFILL,
)
POOLED = (EMBEDDINGS, SCORE, RERANK, COHERE_RERANK)
"""Those of servers that were started to embed."""
