"""A Submit becomes a sequence, or is told at once why it cannot.

Used by the batcher. What must always hold: a sequence that is let in finishes if it is left alone with the engine.
"""

from __future__ import annotations

from quipu.actors.core.limits import Limits
from quipu.actors.core.request import Sequence
from quipu.actors.core.waiting import WaitingQueue
from quipu.actors.messages import Submit


def make_sequence(message: Submit, arrival: int, limits: Limits) -> Sequence:
    sampling = message.sampling
    ends: frozenset[int] = frozenset() if sampling.ignore_eos else limits.eos_token_ids
    num_prompt_tokens = len(message.prompt_token_ids)
    return Sequence(
        id=message.sequence_id,
        arrival=arrival,
        tenant=message.tenant,
        priority=message.priority,
        tokens=list(message.prompt_token_ids),
        known_tokens=message.prompt_token_ids,
        num_prompt_tokens=num_prompt_tokens,
        root_key=message.root_key,
        keys=list(message.block_keys) if limits.enable_prefix_caching else [],
        sampling=sampling,
        stop_ids=ends.union(sampling.stop_token_ids) if sampling.stop_token_ids else ends,
        max_len=num_prompt_tokens + sampling.max_tokens,
        reads_cache=message.reads_cache,
        pins=message.pins,
    )


def why_never(sequence: Sequence, limits: Limits) -> str | None:
    """Why it can never be served, or None."""
    if sequence.num_prompt_tokens == 0:
        return "the prompt is empty"
    if sequence.max_len > limits.max_model_len:
        return f"prompt and max_tokens come to {sequence.max_len} tokens, the context holds {limits.max_model_len}"
    capacity = (limits.num_blocks - 1) * limits.block_size
    if sequence.max_len > capacity:
        return f"prompt and max_tokens come to {sequence.max_len} tokens, the KV cache holds {capacity}"
    return None


def why_not_now(sequence: Sequence, waiting: WaitingQueue, limits: Limits) -> str | None:
    """Why it may not even wait, or None."""
    if limits.max_waiting_requests and len(waiting) >= limits.max_waiting_requests:
        return f"{len(waiting)} requests are waiting already"
    if limits.max_waiting_tokens and waiting.num_tokens + len(sequence.tokens) > limits.max_waiting_tokens:
        return f"{waiting.num_tokens} prompt tokens are waiting already"
    return None
