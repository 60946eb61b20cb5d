"""The detokenizer: from token ids to text, and to each request's outlet.

Hears `Track` (just before a sequence is submitted), `Tokens` (one message a step, after the accountant has booked the
step) and `Forget` (its request is over), in one inbox. Tells the accountant, once a sequence, how many tokens its
client was given and why it stopped (`Completed`), and before that, where its tokens cannot be made into text, that the
request has failed (`Refused`); has the engine stop a sequence whose stop string is complete.

What must always hold: an outlet gets nothing after the piece with a finish reason; what came after a stop string is
neither shown nor counted; one sequence's trouble is not its neighbours'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import attrs
import structlog

from quipu.actors.channel import Poster, Receiver
from quipu.actors.core.scribe import Scribe
from quipu.actors.core.text import StopMatcher, TextStream
from quipu.actors.library import LibraryPanic
from quipu.actors.messages import (
    Completed,
    Delta,
    ErrorKind,
    FinishReason,
    Forget,
    Outlet,
    Refused,
    RequestError,
    ScoredDelta,
    ScoredToken,
    StepScores,
    Tokens,
    Track,
)
from quipu.actors.vocabulary import Vocabulary

log = structlog.get_logger()

DetokenizerMessage = Track | Tokens | Forget


@attrs.define(eq=False)
class TrackedSequence:
    request_id: str
    sequence_id: int
    index: int
    stream: TextStream
    include_stop: bool
    outlet: Outlet
    scribe: Scribe | None = None
    """Where logprobs, or the prompt, were asked for."""
    prompt_only: bool = False
    num_tokens: int = 0
    has_begun: bool = False
    """Its prompt, as far as it is wanted, has been handed out."""


class Detokenizer:
    def __init__(
        self, vocabulary: Vocabulary, accountant: Poster[Completed | Refused], end_sequence: Callable[[int], None]
    ) -> None:
        """`end_sequence(id)` has the engine end a sequence; it never blocks."""
        self._vocabulary = vocabulary
        self._accountant = accountant
        self._end_sequence = end_sequence
        self._tracked: dict[int, TrackedSequence] = {}

    @property
    def num_tracked(self) -> int:
        return len(self._tracked)

    async def run(self, inbox: Receiver[DetokenizerMessage]) -> None:
        """Detokenize until cancelled."""
        while True:
            for message in await inbox.receive_all():
                match message:
                    case Tokens():
                        self._decode(message)
                    case Track():
                        self._track(message)
                    case Forget():
                        for sequence_id in message.sequence_ids:
                            self._forget(sequence_id)

    def _track(self, message: Track) -> None:
        make_decoder = partial(
            self._vocabulary.decoder,
            skip_special_tokens=message.skip_special_tokens,
            prompt_tail=message.prompt_tail,
        )
        scribe = None
        if message.is_scored or message.prompt_only or message.echo is not None:
            scribe = Scribe(self._vocabulary.spell, make_decoder(), message.echo)
        self._tracked[message.sequence_id] = TrackedSequence(
            request_id=message.request_id,
            sequence_id=message.sequence_id,
            index=message.index,
            stream=TextStream(
                make_decoder(),
                StopMatcher(message.stop, include=message.include_stop, num_deaf_pieces=message.min_tokens),
            ),
            include_stop=message.include_stop,
            outlet=message.outlet,
            scribe=scribe,
            prompt_only=message.prompt_only,
        )

    def _decode(self, tokens: Tokens) -> None:
        scored = self._put_into_words(tokens.scores) if tokens.scores else {}
        reasons = dict(zip(tokens.ended_ids, tokens.ended_reasons, strict=True))
        last = {sequence_id: at for at, sequence_id in enumerate(tokens.sequence_ids)} if reasons else {}
        for at, (sequence_id, token_id) in enumerate(zip(tokens.sequence_ids, tokens.token_ids, strict=True)):
            sequence = self._tracked.get(sequence_id)
            if sequence is None:
                continue
            ended = reasons.get(sequence_id) if last.get(sequence_id) == at else None
            reason = None if ended is None else FinishReason(ended)
            try:
                if sequence.scribe is None:
                    self._give(sequence, token_id, reason)
                else:
                    self._give_scored(sequence, sequence.scribe, token_id, reason, scored.get(sequence_id))
            except LibraryPanic:
                self._fail(sequence)

    def _put_into_words(self, steps: list[StepScores]) -> dict[int, deque[ScoredToken]]:
        """Scored outputs by sequence, in order; what was said of prompts is kept by each one's scribe."""
        scored: dict[int, deque[ScoredToken]] = {}
        for step in steps:
            for sequence_id, position, prompt in zip(step.prompt_ids, step.prompt_positions, step.prompts, strict=True):
                sequence = self._tracked.get(sequence_id)
                if sequence is not None and sequence.scribe is not None:
                    try:
                        sequence.scribe.hear_prompt(position, prompt)
                    except LibraryPanic:
                        self._fail(sequence)
            for at, sequence_id in enumerate(step.drawn_ids):
                sequence = self._tracked.get(sequence_id)
                if sequence is not None and sequence.scribe is not None:
                    try:
                        scored.setdefault(sequence_id, deque()).append(sequence.scribe.drawn(step.drawn, at))
                    except LibraryPanic:
                        self._fail(sequence)
        return scored

    def _give_scored(
        self,
        sequence: TrackedSequence,
        scribe: Scribe,
        token_id: int,
        reason: FinishReason | None,
        scored: deque[ScoredToken] | None,
    ) -> None:
        """As `_give`, for one whose client wants more than text: the prompt before the first token, then logprobs."""
        if not sequence.has_begun:
            sequence.has_begun = True
            prompt = ScoredDelta(sequence.index, scribe.echoed_text, 0, None, prompt_scores=scribe.take_prompt())
            if prompt.text or prompt.prompt_scores:
                sequence.outlet.put(prompt)
        if sequence.prompt_only:
            sequence.outlet.put(Delta(sequence.index, "", 0, FinishReason.LENGTH))
            self._complete(sequence, FinishReason.LENGTH)
        else:
            self._give(sequence, token_id, reason, (scored.popleft(),) if scored else ())

    def _give(
        self,
        sequence: TrackedSequence,
        token_id: int,
        reason: FinishReason | None,
        scores: tuple[ScoredToken, ...] = (),
    ) -> None:
        """Hand one token's text out; the last one brings everything that was held back."""
        sequence.num_tokens += 1
        match: str | None = None
        text = ""
        if reason is not FinishReason.STOP or sequence.include_stop:  # a stop token is counted, not shown
            piece = sequence.stream.push(token_id)
            match, text = piece.match, piece.text
        if reason is not None and match is None:
            rest = sequence.stream.flush()
            match, text = rest.match, text + rest.text
        if match is not None:
            if reason is None:
                self._end_sequence(sequence.sequence_id)
            reason = FinishReason.STOP
        if scores:
            sequence.outlet.put(ScoredDelta(sequence.index, text, 1, reason, match, scores))
        else:
            sequence.outlet.put(Delta(sequence.index, text, 1, reason, match))
        if reason is not None:
            self._complete(sequence, reason)

    def _forget(self, sequence_id: int) -> None:
        sequence = self._tracked.get(sequence_id)
        if sequence is not None:
            self._complete(sequence, None)

    def _fail(self, sequence: TrackedSequence) -> None:
        """The tokenizers library cannot make text of a sequence's tokens: its request fails, and nobody else's."""
        log.error("detokenizer.failed", request_id=sequence.request_id)
        error = RequestError(ErrorKind.INTERNAL, "the tokens of the answer could not be made into text")
        self._accountant.post(Refused(sequence.request_id, error))
        self._complete(sequence, None)

    def _complete(self, sequence: TrackedSequence, reason: FinishReason | None) -> None:
        del self._tracked[sequence.sequence_id]
        self._accountant.post(Completed(sequence.request_id, sequence.sequence_id, sequence.num_tokens, reason))
