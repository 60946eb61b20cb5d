"""The detokenizer: from token ids to text, and to each request's outlet.

Hears `Track` (just before a sequence is submitted), `Tokens` (one message a step, after the accountant has booked the
step) and `Forget` (its request is over), in one inbox. Tells the accountant, once a sequence, how many tokens its
client was given and why it stopped (`Completed`), and before that, where its tokens cannot be made into text, that the
request has failed (`Refused`); has the engine stop a sequence whose stop string is complete.

A prompt that is echoed or scored is read once, with its first choice. Its other choices may be ahead, with blocks from
the cache: what they have to say waits until the prompt, with which every choice begins, is complete.

What must always hold: an outlet gets nothing after the piece with a finish reason; what came after a stop string is
neither shown nor counted; one sequence's trouble is not its neighbours'; a step holds the loop for SLICE_S at most.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from weakref import WeakValueDictionary

import attrs
import structlog
import trio

from ..channel import Poster, Receiver
from ..messages.accountant import Completed, Refused
from ..messages.detokenizer import Forget, Tokens, Track
from ..messages.handler import Delta, Outlet, ScoredDelta
from ..messages.outcomes import ErrorKind, FinishReason, RequestError
from ..messages.scores import ScoredToken, Scores, StepScores
from ..shared.tokenizers_library import LibraryPanic
from ..tokenizer.vocabulary import Vocabulary
from .logprob_assembler import PromptReading, Scribe
from .stop_strings import StopStrings
from .text_stream import StopMatcher, TextStream

log = structlog.get_logger()

DetokenizerMessage = Track | Tokens | Forget

SLICE_S = 0.002
"""How long a step's tokens may hold the loop in a row."""
MAX_SPELLINGS = 1 << 16
"""Tokens whose text is kept, for those that are told with logprobs: a vocabulary, or the usual part of it."""


@attrs.define(eq=False)
class TrackedSequence:
    request_id: str
    sequence_id: int
    index: int
    stream: TextStream
    include_stop: bool
    outlet: Outlet
    scribe: Scribe | None = None
    """Where logprobs were asked for."""
    leader_id: int = 0
    """The sequence that its prompt is scored with."""
    reading: PromptReading | None = None
    """Of its prompt, which comes first; None: it is not wanted, or has been handed out."""
    waiting: list[Delta] | None = None
    """Deltas that come after a prompt which is not complete."""
    prompt_only: bool = False
    num_tokens: int = 0


class Detokenizer:
    def __init__(
        self, vocabulary: Vocabulary, accountant: Poster[Completed | Refused], end_sequence: Callable[[int], None]
    ) -> None:
        """`end_sequence(id)` has the engine end a sequence; it never blocks."""
        self._vocabulary = vocabulary
        self._accountant = accountant
        self._end_sequence = end_sequence
        self._tracked: dict[int, TrackedSequence] = {}
        self._stops: WeakValueDictionary[str, StopStrings] = WeakValueDictionary()
        """By request: all of its sequences have the same."""
        self._readings: dict[int, PromptReading] = {}
        """By the sequence that it is scored with, until the request is over: a choice may come late."""
        self._behind: dict[int, list[TrackedSequence]] = {}
        """Sequences that wait for a reading."""
        self._spell = lru_cache(MAX_SPELLINGS)(vocabulary.spell)

    @property
    def num_tracked(self) -> int:
        return len(self._tracked)

    @property
    def num_readings(self) -> int:
        """Prompts whose scores are kept for choices that may still come."""
        return len(self._readings)

    async def run(self, inbox: Receiver[DetokenizerMessage]) -> None:
        """Detokenize until cancelled."""
        while True:
            for message in await inbox.receive_all():
                match message:
                    case Tokens():
                        await self._decode(message)
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
        reading = self._reading_of(message)
        scribe = None
        if message.is_scored:
            scribe = Scribe(self._spell, make_decoder(), 0 if reading is None else len(reading.text))
        self._tracked[message.sequence_id] = TrackedSequence(
            request_id=message.request_id,
            sequence_id=message.sequence_id,
            index=message.index,
            stream=TextStream(
                make_decoder(),
                StopMatcher(self._stops_of(message), include=message.include_stop, num_deaf_pieces=message.min_tokens),
            ),
            include_stop=message.include_stop,
            outlet=message.outlet,
            scribe=scribe,
            leader_id=message.sequence_id if message.scores_from is None else message.scores_from,
            reading=reading,
            prompt_only=message.prompt_only,
        )

    def _reading_of(self, message: Track) -> PromptReading | None:
        """What the choice begins with, where its prompt is wanted."""
        leader_id = message.scores_from
        if leader_id is None:
            return None if message.echo is None else PromptReading(self._spell, message.echo, 0)
        reading = self._readings.get(leader_id)
        if reading is None:
            reading = PromptReading(self._spell, message.echo, message.num_prompt_scores)
            self._readings[leader_id] = reading
        return reading

    def _stops_of(self, message: Track) -> StopStrings | None:
        if not message.stop:
            return None
        stops = self._stops.get(message.request_id)
        if stops is None:
            stops = self._stops[message.request_id] = StopStrings(message.stop)
        return stops

    async def _decode(self, tokens: Tokens) -> None:
        """Hand out a step's tokens. Others run in between, where there are many."""
        slice_end = time.perf_counter() + SLICE_S
        scored = self._put_into_words(tokens.scores) if tokens.scores else {}
        reasons = dict(zip(tokens.ended_ids, tokens.ended_reasons, strict=True))
        last = {sequence_id: at for at, sequence_id in enumerate(tokens.sequence_ids)} if reasons else {}
        for at, (sequence_id, token_id) in enumerate(zip(tokens.sequence_ids, tokens.token_ids, strict=True)):
            sequence = self._tracked.get(sequence_id)
            if sequence is None:
                continue
            if time.perf_counter() > slice_end:
                await trio.lowlevel.checkpoint()
                slice_end = time.perf_counter() + SLICE_S
            ended = reasons.get(sequence_id) if last.get(sequence_id) == at else None
            reason = None if ended is None else FinishReason(ended)
            try:
                self._take(sequence, token_id, reason, scored.get(sequence_id))
            except LibraryPanic:
                self._fail(sequence)

    def _take(
        self,
        sequence: TrackedSequence,
        token_id: int,
        reason: FinishReason | None,
        scored: deque[tuple[Scores, int]] | None,
    ) -> None:
        """One token of a sequence has come, behind what the sequence begins with."""
        if sequence.reading is not None:
            self._begin(sequence, sequence.reading)
        if sequence.prompt_only:
            self._put(sequence, Delta(sequence.index, "", 0, FinishReason.LENGTH))
            self._complete(sequence, FinishReason.LENGTH)
            return
        scores: tuple[ScoredToken, ...] = ()
        if sequence.scribe is not None and scored:
            scores = (sequence.scribe.drawn(*scored.popleft()),)
        self._give(sequence, token_id, reason, scores)

    def _put_into_words(self, steps: list[StepScores]) -> dict[int, deque[tuple[Scores, int]]]:
        """Scored outputs by sequence, in order; what was said of prompts goes to their readings."""
        scored: dict[int, deque[tuple[Scores, int]]] = {}
        for step in steps:
            for leader_id, position, prompt in zip(step.prompt_ids, step.prompt_positions, step.prompts, strict=True):
                reading = self._readings.get(leader_id)
                if reading is None:
                    continue
                reading.hear(position, prompt)
                if reading.is_complete:
                    for sequence in self._behind.pop(leader_id, ()):
                        self._catch_up(sequence, reading)
            for at, sequence_id in enumerate(step.drawn_ids):
                scored.setdefault(sequence_id, deque()).append((step.drawn, at))
        return scored

    def _begin(self, sequence: TrackedSequence, reading: PromptReading) -> None:
        """The prompt comes before the first token; where it is not complete, both wait."""
        sequence.reading = None
        if reading.is_complete:
            self._put_prompt(sequence, reading)
        else:
            sequence.waiting = []
            self._behind.setdefault(sequence.leader_id, []).append(sequence)

    def _put_prompt(self, sequence: TrackedSequence, reading: PromptReading) -> None:
        if reading.text or len(reading.scores):
            sequence.outlet.put(ScoredDelta(sequence.index, reading.text, 0, None, prompt_scores=reading.scores))

    def _catch_up(self, sequence: TrackedSequence, reading: PromptReading) -> None:
        """Its prompt is complete: hand out what has waited for that, perhaps all of it."""
        self._put_prompt(sequence, reading)
        waiting, sequence.waiting = sequence.waiting or [], None
        for delta in waiting:
            sequence.outlet.put(delta)

    def _put(self, sequence: TrackedSequence, delta: Delta) -> None:
        if sequence.waiting is None:
            sequence.outlet.put(delta)
        else:
            sequence.waiting.append(delta)

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
            self._put(sequence, ScoredDelta(sequence.index, text, 1, reason, match, scores))
        else:
            self._put(sequence, Delta(sequence.index, text, 1, reason, match))
        if reason is not None:
            self._complete(sequence, reason)

    def _forget(self, sequence_id: int) -> None:
        self._readings.pop(sequence_id, None)
        self._behind.pop(sequence_id, None)
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
