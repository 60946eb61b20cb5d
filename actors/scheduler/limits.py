"""Sizes and rules that the scheduler's decisions keep to. Made from the engine's configuration, read by `core/`."""

from __future__ import annotations

import attrs

from .waiting import Policy


@attrs.frozen
class Limits:
    """Sizes of the engine. `max_num_batched_tokens` is the token budget of one step."""

    block_size: int
    num_blocks: int
    """The null block included."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    enable_prefix_caching: bool = True
    max_steps_in_flight: int = 2
    policy: Policy = Policy.FCFS
    long_prefill_token_threshold: int = 0
    """Longest chunk of one prompt in a step that others share; 0 is off."""
    max_waiting_requests: int = 0
    """Sequences that may wait; further requests are refused. 0 is no limit."""
    max_waiting_tokens: int = 0
    """Prompt tokens that may wait."""
    max_waiting_share: float = 1.0
    """Of both, what one tenant's may take up."""
