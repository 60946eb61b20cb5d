"""The detokenizer: from token ids to text, and to each request's outlet.

Hears `Track` (just before a sequence is submitted), `Tokens` (one message a step, after the accountant has booked the
step) and `Forget` (its request is over), in one inbox. Tells the accountant, once a sequence, how many tokens its
client was given and why it stopped (`Completed`); has the engine stop a sequence whose stop string is complete.

What must always hold: an outlet gets nothing after the piece with a finish reason; what came after a stop string is
neither shown nor counted; one sequence's trouble is not its neighbours'.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import structlog

from quipu.actors.channel import Poster, Receiver
from quipu.actors.core.text import StopMatcher, TextStream
from quipu.actors.messages import Completed, Delta, FinishReason, Forget, Outlet, Tokens, Track
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
    num_tokens: int = 0


class Detokenizer:
    def __init__(
        self, vocabulary: Vocabulary, accountant: Poster[Completed], end_sequence: Callable[[int], None]
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
        decoder = self._vocabulary.decoder(
            skip_special_tokens=message.skip_special_tokens, prompt_tail=message.prompt_tail
        )
        self._tracked[message.sequence_id] = TrackedSequence(
            request_id=message.request_id,
            sequence_id=message.sequence_id,
            index=message.index,
            stream=TextStream(decoder, StopMatcher(message.stop, include=message.include_stop)),
            include_stop=message.include_stop,
            outlet=message.outlet,
        )

    def _decode(self, tokens: Tokens) -> None:
        reasons = dict(zip(tokens.ended_ids, tokens.ended_reasons, strict=True))
        last = {sequence_id: at for at, sequence_id in enumerate(tokens.sequence_ids)} if reasons else {}
        for at, (sequence_id, token_id) in enumerate(zip(tokens.sequence_ids, tokens.token_ids, strict=True)):
            sequence = self._tracked.get(sequence_id)
            if sequence is None:
                continue
            reason = reasons.get(sequence_id) if last.get(sequence_id) == at else None
            self._give(sequence, token_id, None if reason is None else FinishReason(reason))

    def _give(self, sequence: TrackedSequence, token_id: int, reason: FinishReason | None) -> None:
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
        sequence.outlet.put(Delta(sequence.index, text, 1, reason, match))
        if reason is not None:
            self._complete(sequence, reason)

    def _forget(self, sequence_id: int) -> None:
        sequence = self._tracked.get(sequence_id)
        if sequence is not None:
            self._complete(sequence, None)

    def _complete(self, sequence: TrackedSequence, reason: FinishReason | None) -> None:
        del self._tracked[sequence.sequence_id]
        self._accountant.post(Completed(sequence.request_id, sequence.sequence_id, sequence.num_tokens, reason))
