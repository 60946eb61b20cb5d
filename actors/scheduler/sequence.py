"""One sequence as the scheduler knows it.

`next_start` runs ahead of the device: it is the first position that no step has been planned for. What is known for
sure is in `tokens`.

    tokens      p p p p p p o o          p prompt, o output known
    next_start  - - - - - - - - - ^      a step in flight feeds position 8, with a token that the one before it draws

While `next_start` is short of `prefill_end` the sequence is prefilling: its tokens are known and go out in chunks.
From there on it decodes: one position a step, fed on the device.
"""

from __future__ import annotations

from enum import Enum

import attrs

from ..messages.outcomes import ErrorKind
from ..messages.prompts import Pin
from ..messages.sampling import SamplingParams


class Status(Enum):
    WAITING = 1
    RUNNING = 2
    ENDED = 3
    """Nothing more is planned for it; its Terminal goes out once no step in flight holds it."""


@attrs.define(eq=False)
class Sequence:
    id: int
    arrival: int
    """Position in the order of arrival; survives preemption."""
    tenant: str
    priority: int
    """Lower is served first, where the policy looks at it."""
    tokens: list[int]
    known_tokens: list[int]
    """Those of the time when it began to wait; never changed, and so fit to be sent."""
    num_prompt_tokens: int
    root_key: bytes
    keys: list[bytes]
    """Chain keys of the full blocks whose tokens are known."""
    sampling: SamplingParams
    stop_ids: frozenset[int]
    """Tokens that end it when drawn."""
    max_len: int
    """Prompt and outputs together, at most."""
    reads_cache: bool = True
    """Whether cached blocks may serve it, at any admission."""
    pins: tuple[Pin, ...] = ()
    """Prefixes of the prompt that are to be kept."""
    num_scored: int = 1
    """Prompt tokens whose scores have been handed out, where they are wanted; the first has none."""
    status: Status = Status.WAITING
    next_start: int = 0
    prefill_end: int = 0
    """Tokens known at its admission: what has to be computed before it decodes."""
    num_slots: int = 0
    """Positions that its blocks hold."""
    unsent_blocks: list[int] = attrs.field(factory=list)
    """Blocks that it holds and the executor does not know of: the plan that named them was dropped."""
    epoch: int = 0
    """Raised by preemption and withdrawal: tokens drawn for an earlier epoch are void."""
    num_admissions: int = 0
    last_step: int = 0
    """The latest step that it was planned into."""
    error: str | None = None
    error_kind: ErrorKind | None = None

    @property
    def is_prefilling(self) -> bool:
        return self.next_start < self.prefill_end

    @property
    def is_decoding(self) -> bool:
        """Past its prefill, with outputs left that no step draws yet."""
        return self.prefill_end <= self.next_start < self.max_len - 1

    def restart(self) -> None:
        """Forget what was computed (preempted, or its admission withdrawn); outputs that are known stay."""
        self.status = Status.WAITING
        self.known_tokens = list(self.tokens)
        self.next_start = 0
        self.num_slots = 0
        self.unsent_blocks = []
        self.epoch += 1
