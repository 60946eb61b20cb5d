"""One sequence as the scheduler knows it.

`num_computed` and `num_pending` run ahead of the device: they say what will be so once every step that was sent is
done. What is known for sure is in `tokens`.

    tokens        p p p p p p o o | ?        p prompt, o output known, ? output in flight (num_pending of them)
    num_computed  ------------->             positions whose KV is written or will be by a step in flight
"""

from __future__ import annotations

from enum import Enum

import attrs

from quipu.actors.messages import ErrorKind, SamplingParams


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
    tokens: list[int]
    num_prompt_tokens: int
    root_key: bytes
    keys: list[bytes]
    """Chain keys of the full blocks whose tokens are known."""
    sampling: SamplingParams
    status: Status = Status.WAITING
    num_computed: int = 0
    num_pending: int = 0
    epoch: int = 0
    """Raised by preemption and withdrawal: tokens drawn for an earlier epoch are void."""
    num_admissions: int = 0
    num_in_flight: int = 0
    """Steps sent and not answered that hold it."""
    error: str | None = None
    error_kind: ErrorKind | None = None

    @property
    def num_total(self) -> int:
        """Tokens it has, those in flight included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_remaining(self) -> int:
        """Positions that can be computed next."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def may_grow(self) -> bool:
        """Whether another output may be drawn."""
        return len(self.tokens) + self.num_pending - self.num_prompt_tokens < self.sampling.max_tokens

    def restart(self) -> None:
        """Forget what was computed (preempted, or its admission withdrawn); outputs that are known stay."""
        self.status = Status.WAITING
        self.num_computed = 0
        self.num_pending = 0
        self.epoch += 1
