"""What is kept of each submitted sequence until its end, and how it is submitted again to another engine.

Used by `live_sequences.py`, which owns it all. Synchronous.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ..messages.scheduler import Submit
from .open_requests import OpenRequest


@attrs.define(eq=False)
class LiveSequence:
    """A submitted sequence that has not been answered by a Terminal."""

    request: OpenRequest
    submit: Submit
    incarnation: int | None = None
    """The engine that holds it; None while it is queued, or waits for a search to end."""
    engine_id: int | None = None
    has_slot: bool = False
    numerics: str | None = None
    """Of the last engine that held it."""
    is_handed_over: bool = False
    """Its engine was told to end it, so that another one resumes it."""
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
                is_resumed=True,
                num_to_come=num_to_come,
                tokens_to_come=tokens_to_come,
            )
        )
        groups[submit.group_id] = again[-1]
    return again[::-1]
