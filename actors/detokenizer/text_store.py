"""The text store: everything the detokenizer knows about the sequences it follows, kept where its death cannot lose it.

Owned by `wiring`, written by the detokenizer. After a death, its successor goes on with the message that was being
handled, from the token after the last one that was sent.

    inbox ──▶ pending ──▶ token by token: computed ──▶ sent and counted ──▶ done

A stream (decoder, parser, stop strings) cannot be trusted after it has raised, so that of the sequence in hand is made
again and given the tokens that its client has already been given.

What must always hold: a token is sent and counted in one step, in which nothing raises; a message leaves `pending` only
when all of it was handled; nothing is kept of a sequence after `Forget`.
"""

from __future__ import annotations

from collections import deque
from weakref import WeakValueDictionary

import attrs

from ..messages.detokenizer import Forget, Tokens, Track
from ..messages.scores import Scores
from .logprob_assembler import PromptAssembler
from .prompt_vector import PromptVector
from .stop_strings import StopStrings
from .tracked_sequence import TrackedSequence

DetokenizerMessage = Track | Tokens | Forget

MAX_DEATHS = 2
"""A request is refused if the detokenizer dies this often while it handles one message, with that request in hand."""

MAX_REFUSED = 256


@attrs.define(eq=False)
class PendingTexts:
    """A message that the detokenizer is handling or will handle, and how far it got."""

    message: DetokenizerMessage
    scored: dict[int, deque[tuple[Scores, int]]] | None = None
    """Scores of outputs that were not sent yet, by sequence, in order. None: not sorted yet."""
    next_token: int = 0
    """Index after the last token that was sent."""


@attrs.define(eq=False)
class TextStore:
    pending: deque[PendingTexts] = attrs.field(factory=deque)
    tracked: dict[int, TrackedSequence] = attrs.field(factory=dict)
    stops: WeakValueDictionary[str, StopStrings] = attrs.field(factory=WeakValueDictionary)
    """By request: all its sequences share one."""
    prompts: dict[int, PromptAssembler | PromptVector] = attrs.field(factory=dict)
    """By the sequence with which it is scored, until the request is over: a choice may come late."""
    deferred: dict[int, deque[TrackedSequence]] = attrs.field(factory=dict)
    """Sequences that wait for a prompt, by the sequence with which it is scored."""
    in_hand: Track | TrackedSequence | PromptAssembler | PromptVector | None = None
    """What is being worked on: its request is the suspect if the detokenizer dies."""
    torn: Track | TrackedSequence | PromptAssembler | PromptVector | None = None
    """What was in hand at the last death, until that has been dealt with."""
    _num_deaths: dict[str, int] = attrs.field(factory=dict)
    """Deaths at the first pending message, by the request in hand."""
    refused: dict[str, None] = attrs.field(factory=dict)
    """The last requests that were refused for killing the detokenizer. Some of their messages may still come."""
    _num_handled: int = 0
    """Messages that were handled without refusing a request, and tokens of sequences no longer tracked."""

    @property
    def progress(self) -> int:
        """A number that rises with every token that is sent, and with every message without a refused request."""
        return self._num_handled + sum(sequence.num_tokens for sequence in self.tracked.values())

    def take_off(self) -> None:
        """Remove the first pending message, which was handled."""
        self.in_hand = None
        self._num_handled += not self.culprits
        if self._num_deaths:
            self._num_deaths = {}
        self.pending.popleft()

    def untrack(self, sequence: TrackedSequence) -> None:
        del self.tracked[sequence.sequence_id]
        self._num_handled += sequence.num_tokens

    # ------------------------------------------------------------ deaths

    def record_death(self) -> str | None:
        """Record that the detokenizer has died, and return the id of the request that it was working on, if any."""
        if self.in_hand is None:
            return None
        self.torn, self.in_hand = self.in_hand, None
        request_id = self.torn.request_id
        self._num_deaths[request_id] = self._num_deaths.get(request_id, 0) + 1
        return request_id

    @property
    def culprits(self) -> list[str]:
        """Requests that have killed the detokenizer too often at the first pending message."""
        return [request_id for request_id, count in self._num_deaths.items() if count >= MAX_DEATHS]

    def note_refused(self, request_id: str) -> None:
        self.refused[request_id] = None
        if len(self.refused) > MAX_REFUSED:
            del self.refused[next(iter(self.refused))]
