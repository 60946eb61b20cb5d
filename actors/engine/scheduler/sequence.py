"""One sequence as the scheduler knows it.

`next_start` runs ahead of the device: it is the first position that no step has been planned for, if each step in
flight advances the sequence as far as it may. A step's result says how far it did. Only tokens that are known are in
`tokens`.

    tokens      p p p p p p o o          p prompt, o output known
    next_start  - - - - - - - - - ^      a step in flight feeds position 8, with the token sampled by the one before it

While `next_start` is below `prefill_end` the sequence is prefilling: its tokens are known and sent in chunks. From
there on it decodes, at most `most_positions` of a plan per step, fed on the device. Sequences that decode advance
together: what a step adds is counted once, in the `SharedAdvance` of their set.
"""

from __future__ import annotations

from enum import Enum

import attrs

from ...messages.images import PromptImage
from ...messages.outcomes import ErrorKind
from ...messages.peers import Peer
from ...messages.prompts import Pin
from ...messages.sampling import SamplingParams
from ...messages.scheduler import SequenceKind


class Status(Enum):
    WAITING = 1
    RUNNING = 2
    ENDED = 3
    """Nothing more is planned for it; its Terminal is reported once no step in flight contains it."""


class SharedAdvance:
    """How far sequences have advanced together since they joined."""

    __slots__ = ("last_step", "positions")

    def __init__(self) -> None:
        self.positions = 0
        self.last_step = 0
        """The latest step that they were planned into together; 0 before the first."""


ALONE = SharedAdvance()
"""That of a sequence that advances with no other. Never changed."""


@attrs.define(eq=False)
class Sequence:
    id: int
    arrival: int
    """Position in the order of arrival; kept across preemptions."""
    tenant: str
    priority: int
    """Lower values are served first under the `priority` policy."""
    tokens: list[int]
    known_tokens: list[int]
    """`tokens` as of when it last began to wait. Never changed, so other actors may keep a reference."""
    num_prompt_tokens: int
    root_key: bytes
    keys: list[bytes]
    """Chain keys of the full blocks whose tokens are known."""
    sampling: SamplingParams
    stop_ids: frozenset[int]
    """Tokens that end it when sampled."""
    max_len: int
    """Upper bound on prompt and output tokens together. The last of them is not computed, unless it is the prompt's."""
    is_batch: bool = False
    """Nobody waits for it: others are served first."""
    reads_cache: bool = True
    """Whether it may use cached blocks, at any admission."""
    pins: tuple[Pin, ...] = ()
    """Prefixes of the prompt to keep in the cache."""
    kind: SequenceKind = SequenceKind.GENERATE
    adapter: str = ""
    images: tuple[PromptImage, ...] = ()
    whole_images: tuple[PromptImage, ...] = ()
    """Those within which no chunk may end."""
    peer: Peer | None = None
    """The engine that computed it so far."""
    full_len: int = attrs.field(default=attrs.Factory(lambda self: self.max_len, takes_self=True))
    """That bound wherever the sequence ends: larger if it leaves for another engine before."""
    num_scored: int = 1
    """Prompt tokens whose scores have been reported, if they are wanted; the first token has none."""
    status: Status = Status.WAITING
    prefill_end: int = 0
    """Number of tokens known at its admission, which have to be computed before it decodes."""
    last_advance: int = 1
    """How many positions it has advanced in the last step that could have had several."""
    num_slots: int = 0
    """Positions for which it has blocks."""
    unsent_blocks: list[int] = attrs.field(factory=list)
    """Blocks it holds that the executor does not know of, because the plan that named them was dropped."""
    epoch: int = 0
    """Incremented when it returns to the queue: tokens sampled for an earlier epoch are void."""
    num_admissions: int = 0
    has_loaded: bool = False
    """Blocks have been loaded for it, or are being loaded: the block manager knows it, though it may be waiting."""
    _advance: SharedAdvance = ALONE
    _start: int = 0
    """`next_start` without what it has advanced together with others."""
    _own_last_step: int = 0
    error: str | None = None
    error_kind: ErrorKind | None = None

    @property
    def next_start(self) -> int:
        """The first position that no step has been planned for."""
        return self._start + self._advance.positions

    @next_start.setter
    def next_start(self, position: int) -> None:
        self._start = position - self._advance.positions

    @property
    def last_step(self) -> int:
        """The latest step that it was planned into."""
        return max(self._own_last_step, self._advance.last_step)

    @last_step.setter
    def last_step(self, step: int) -> None:
        self._own_last_step = step

    def advance_with(self, others: SharedAdvance) -> None:
        """Advance together with others from here on, and no longer with those of before."""
        before, self._advance = self._advance, others
        self._start += before.positions - others.positions
        self._own_last_step = max(self._own_last_step, before.last_step)

    @property
    def is_prefilling(self) -> bool:
        return self.next_start < self.prefill_end

    @property
    def is_decoding(self) -> bool:
        """Whether it is past its prefill with outputs left that no step in flight may sample."""
        return self.prefill_end <= self.next_start < self.max_len - 1

    @property
    def leaves(self) -> bool:
        """Whether it ends here for another engine to continue it."""
        return self.max_len < self.full_len

    def furthest(self, most_positions: int) -> int:
        """Return where a step ends at the furthest that lets it advance so many positions. The last is not computed."""
        return min(self.next_start + most_positions, self.max_len - 1)

    def restart(self) -> None:
        """Forget what was computed, because it was preempted or its admission undone; known outputs stay."""
        self.status = Status.WAITING
        self.known_tokens = list(self.tokens)
        self.next_start = 0
        self.num_slots = 0
        self.unsent_blocks = []
        self.epoch += 1
