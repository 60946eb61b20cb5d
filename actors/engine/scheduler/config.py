"""Sizes and rules that scheduling decisions keep to, from the engine's configuration and the backend's KV cache."""

from __future__ import annotations

import attrs

from .waiting import Policy


@attrs.frozen
class SchedulerConfig:
    """What the scheduler needs of `EngineConfig`, resolved."""

    block_size: int
    num_blocks: int
    """Physical blocks, including the null block."""
    max_num_seqs: int
    max_num_batched_tokens: int
    """Token budget of one step."""
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    enable_prefix_caching: bool = True
    max_steps_in_flight: int = 2
    plans_late: bool = False
    """Whether a plan that the executor cannot begin yet may wait for requests that are still to arrive."""
    watermark_blocks: int = 0
    """Blocks that an admission leaves free while other sequences run."""
    most_positions: int = 1
    """The most positions that a decoding sequence may advance in one step: as many tokens as the backend yields."""
    most_draft_tokens: int | None = None
    """The most positions by which a step exceeds one for each decoding sequence; None: as many as each may advance."""
    policy: Policy = Policy.FCFS
    long_prefill_token_threshold: int = 0
    """Longest chunk of one prompt in a step shared with others; 0 disables the limit."""
    max_waiting_requests: int = 0
    """Sequences that may wait before further requests are refused; 0 means no limit."""
    max_waiting_tokens: int = 0
    """Prompt tokens that may wait; 0 means no limit."""
    has_quotas: bool = False
    """Whether the KV-block manager limits what tenants have, and needs to know whose each candidate is."""
    whole_image_tokens: int = 0
    """Tokens of an image that a step has to compute together (`shared/whole_images.py`); 0: images may be divided. A
    step must have room for them beside `max_num_seqs` sequences that decode."""
    max_waiting_share: float = 1.0
    """Share of both limits that one tenant may use."""

    @property
    def least_budget(self) -> int:
        """Positions that a step has to have, however little memory there is."""
        return self.whole_image_tokens + self.max_num_seqs if self.whole_image_tokens else 1
