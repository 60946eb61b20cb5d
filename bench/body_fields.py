"""Fields that the bodies of several endpoints have: sampling, caching, delivery and the like.

Hypothesis strategies, of which `bodies.py` draws. Those of sampling fields are made of
their declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from bench.body_parts import CACHE_TTL, JUNK, LAST_TOKEN, OBJECT, TEXT, TOKEN, mostly
from quipu.actors.config.declarations import SamplingField
from quipu.actors.messages.sampling import SAMPLING_FIELDS

EFFORT = mostly(st.sampled_from(["none", "minimal", "low", "medium", "high", "xhigh", "max"]), JUNK)
BUDGET = mostly(st.sampled_from([-1, 0, 1, 5, 10**6]), JUNK)


def _numbers(field: SamplingField) -> Strategy[Any]:
    """Draw numbers within the bounds of a field, including its default, and a few outside them."""
    bounds = field.bounds
    low = next((limit for limit in (bounds.minimum, bounds.above) if limit is not None), -1)
    right, wrong = [field.default], [low - 1]
    (right if bounds.above is None else wrong).append(low)
    if bounds.maximum is not None:
        right.append(bounds.maximum)
        wrong.append(bounds.maximum + 1)
    if field.reader == "number":
        right.append(low + 0.3 * (2 if bounds.maximum is None else bounds.maximum - low))
    elif bounds.maximum is None:
        right += [1] if field.at_most_max_tokens else [1, 50, 10**6]
    return mostly(st.sampled_from(right), st.sampled_from(wrong))


_VALUES: Mapping[str, Strategy[Any]] = {
    "boolean": st.booleans(),
    "seed": st.integers(-5, 5) | st.sampled_from([2**63, 2**64, -(2**63)]),
    "biases": mostly(
        st.dictionaries(st.integers(0, LAST_TOKEN).map(str), st.floats(-100, 100), max_size=4),
        st.dictionaries(st.integers(-1, 4097).map(str) | st.text(max_size=3), st.floats(-101, 101), max_size=4),
    ),
    "some_token_ids": mostly(st.lists(st.integers(0, LAST_TOKEN), min_size=1, max_size=6), st.lists(TOKEN, max_size=6)),
    "token_ids": mostly(st.lists(st.integers(0, LAST_TOKEN), max_size=4), st.lists(TOKEN, max_size=4)),
    "words": st.lists(TEXT.map(lambda text: text[:300]), max_size=4),
}
"""By the parser that reads them (`web/api/sampling.py`)."""
SAMPLING: Mapping[str, Strategy[Any]] = {
    field.name: _VALUES[field.reader] if field.reader in _VALUES else _numbers(field) for field in SAMPLING_FIELDS
}
CHOICES: Mapping[str, Strategy[Any]] = {
    "stop": st.lists(st.text(min_size=1, max_size=5), max_size=5) | st.text(max_size=5) | st.just(["a" * 4096] * 16),
    "n": mostly(st.integers(1, 4), st.sampled_from([0, 16, 128, 129])),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "response_format": mostly(st.just({"type": "text"}), JUNK),
}
ADMISSION: Mapping[str, Strategy[Any]] = {
    "priority": mostly(st.just(0), st.integers(-2, 2)),
    "truncate_prompt_tokens": mostly(st.none(), st.integers(-2, 30)),
    "truncation_side": mostly(st.sampled_from(["left", "right"]), JUNK),
    "cache_salt": st.text(max_size=5) | st.just("s" * 257),
}
FOREIGN: Mapping[str, Strategy[Any]] = {
    "typical_p": mostly(st.just(1.0), JUNK),
    "repeat_last_n": mostly(st.just(-1), JUNK),
    "options": mostly(st.fixed_dictionaries({}, optional={"num_ctx": st.integers()}), OBJECT),
    "keep_alive": JUNK,
}
"""Of other servers."""
CACHING: Mapping[str, Strategy[Any]] = {
    "prompt_cache_options": mostly(
        st.fixed_dictionaries(
            {},
            optional={
                "mode": mostly(st.sampled_from(["implicit", "explicit"]), JUNK),
                "prewarm": mostly(st.booleans(), JUNK),
                "ttl": CACHE_TTL,
            },
        ),
        JUNK,
    ),
    "prompt_cache_retention": mostly(st.sampled_from(["in_memory", "24h"]), JUNK),
}
AFFINITY: Mapping[str, Strategy[Any]] = {
    **CACHING,
    "prompt_cache_key": mostly(TEXT, JUNK),
    "user": mostly(TEXT, JUNK),
}
DELIVERY: Mapping[str, Strategy[Any]] = {
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "return_cached_tokens_details": st.booleans(),
    "user": st.text(max_size=5),
}
TEMPLATE: Mapping[str, Strategy[Any]] = {
    "chat_template_kwargs": OBJECT,
    "add_generation_prompt": st.booleans(),
}
MAX_TOKENS = mostly(st.integers(1, 6), st.sampled_from([0, -1, 40, 10**6]))
