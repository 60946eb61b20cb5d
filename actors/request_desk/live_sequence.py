"""What is kept of each submitted sequence until its end, and how it is submitted again to another engine.

Used by `live_sequences.py`, which owns it all. Synchronous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from ..messages.peers import Peer
from ..messages.router import SequenceEnded
from ..messages.scheduler import Submit
from .engine_pool import PooledEngine, SequenceMessage
from .open_requests import OpenRequest


class RouterInbox(Protocol):
    def post(self, item: SequenceMessage | SequenceEnded, /) -> None: ...

    def post_first(self, items: Sequence[SequenceMessage], /) -> None: ...


@attrs.frozen
class FormerEngine:
    """An engine that a sequence has left, and which may still have its blocks."""

    peer: Peer
    incarnation: int


@attrs.define(eq=False)
class LiveSequence:
    """A submitted sequence that has not been answered by a Terminal."""

    request: OpenRequest
    submit: Submit
    incarnation: int | None = None
    """The engine that holds it; None while it is queued, or waits for a search to end."""
    engine_id: int | None = None
    held_at: FormerEngine | None = None
    """Where that engine's blocks can be fetched; None: nowhere."""
    has_slot: bool = False
    numerics: str | None = None
    """Of the last engine that held it."""
    is_handed_over: bool = False
    """Its engine was told to end it, so that another one resumes it."""
    ends_after_prefill: bool = False
    """Its engine ends it with its first token by itself, likewise."""
    moves: bool = False
    """The next engine may fetch its blocks from this one."""
    former: FormerEngine | None = None
    """The last engine that it left with its blocks."""
    is_moving: bool = False
    """It has left `former`, and no other engine has admitted it."""
    goes_to: frozenset[int] = frozenset()
    """The engines, by id, of which one is to continue it, if any of them can. Empty: any."""
    leaves_as_planned: bool = False
    """It has left an engine that was to compute its prompt alone, and no other has taken it."""
    aborted: bool = False
    has_ended: bool = False
    """The engine has drawn its last token."""
    output_token_ids: list[int] = attrs.field(factory=list)
    """Tokens that engines have reported. Empty if nothing is ever resumed."""
    num_computed: int = 0
    """Positions that were computed when its last engine died."""
    num_scored: int = 1
    """Prompt tokens whose scores were reported, if they are wanted; the first has none."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def needs_no_prompt(self) -> bool:
        """Whether everything that its client wants of its prompt was reported, so that cached blocks will do."""
        is_scored = self.submit.sampling.prompt_logprobs is None or self.num_scored >= len(self.submit.prompt_token_ids)
        return bool(self.output_token_ids) and is_scored

    @property
    def is_about_to_end(self) -> bool:
        """Whether its engine has ended it, or was told to."""
        return self.aborted or self.has_ended or self.is_handed_over

    def left(self, engine: PooledEngine) -> bool:
        """Whether this is the engine that it left with its blocks."""
        return self.former is not None and self.former.peer.engine_id == engine.engine_id

    def leave(self, *, with_blocks: bool = True) -> None:
        """Note that its engine has ended it, so that another one resumes it. `with_blocks`: it has any there."""
        self.leaves_as_planned = self.ends_after_prefill and not self.is_handed_over
        self.is_moving = self.moves and with_blocks and self.held_at is not None
        if self.is_moving:
            self.former = self.held_at
        self.forget_engine()

    def forget_engine(self) -> None:
        """Note that no engine holds it."""
        self.incarnation = self.engine_id = self.held_at = None
        self.is_handed_over = self.ends_after_prefill = self.moves = False


@attrs.frozen
class TakenBack:
    """The fate of the sequences that a dead engine held."""

    resumed: tuple[int, ...] = ()
    """They run again, now or after others."""
    ended: tuple[int, ...] = ()
    """The engine had drawn their last token, or was to end them."""
    failed: tuple[int, ...] = ()
    culprits: tuple[int, ...] = ()
    """Failed, because engines died while their request was the only one that could be the cause."""


def submit_again(sequences: Sequence[LiveSequence]) -> list[Submit]:
    """Return what to submit of sequences that are resumed, in their order."""
    again: list[Submit] = []
    groups: dict[int, Submit] = {}
    for live in reversed(sequences):
        submit = live.submit
        after = groups.get(submit.group_id) if submit.group_id else None
        if after is None and submit.group_id == live.request.group_id:  # those that follow were not submitted yet
            num_to_come, tokens_to_come = live.request.num_to_come, live.request.tokens_to_come
        elif after is None:
            num_to_come = tokens_to_come = 0
        else:
            num_to_come, tokens_to_come = after.num_to_come + 1, after.tokens_to_come + len(after.prompt_token_ids)
        again.append(
            attrs.evolve(
                submit,
                output_token_ids=list(live.output_token_ids),
                num_scored=live.num_scored,
                reads_cache=submit.reads_cache or live.needs_no_prompt,
                peer=None if live.former is None else live.former.peer,
                is_resumed=True,
                num_to_come=num_to_come,
                tokens_to_come=tokens_to_come,
            )
        )
        groups[submit.group_id] = again[-1]
    return again[::-1]
