"""The detokenizer: from token ids to text, and on to each request's outlet.

One inbox receives `Track` (just before a sequence is submitted), `Tokens` (one message per step, after the accountant
has booked the step) and `Forget` (the request is over). The accountant gets a `Completed` for each sequence, after a
`Refused` if its tokens cannot be decoded. A complete stop string ends its sequence in the engine.

A prompt that is echoed or scored is assembled once, with its first choice. Its other choices may be ahead, with blocks
from the cache: their deltas wait until the prompt is complete.

All state is in the text store, which outlives the detokenizer. After a death its successor makes the stream of the
sequence in hand again and goes on with the token that was being handled; if that kills it too, the request fails.

What must always hold: an outlet gets nothing after the delta with a finish reason; a failing sequence does not affect
others; a step, and making a stream again, hold the event loop for at most SLICE_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

import structlog
import trio

from ..channel import Poster, Receiver
from ..messages.accountant import Completed, Refused
from ..messages.detokenizer import Forget, Tokens, Track
from ..messages.outcomes import FinishReason
from ..shared.tokenizers_library import LibraryPanic
from .decoder import Decoder
from .delivery import Delivery, OutletFailed, output_scores
from .logprob_assembler import PromptAssembler
from .parsed_stream import ParserFailed
from .prompt_vector import PromptVector
from .response_parsing.response_template import ResponseTemplate
from .stop_strings import StopStrings
from .text_store import DetokenizerMessage, PendingTexts, TextStore
from .tracked_sequence import SequenceMaker, TrackedSequence

log = structlog.get_logger()

SLICE_S = 0.002
"""How long a step's tokens may hold the event loop without a checkpoint."""

MAX_ROWS_NOW = 16
"""Tokens of a step that are decoded in the accountant's task, where waking the detokenizer would cost as much."""

FAILURES = (LibraryPanic, ParserFailed, OutletFailed)
"""Exceptions that fail one request at once."""


class Detokenizer:
    def __init__(
        self,
        store: TextStore,
        decoder: Decoder,
        accountant: Poster[Completed | Refused],
        end_sequence: Callable[[int], None],
        template: ResponseTemplate | None = None,
    ) -> None:
        """`end_sequence(sequence_id)` has the engine end a sequence; it never blocks.

        `template`: how the model writes reasoning and calls. None: all of its output is text.
        """
        self._store = store
        self._accountant = accountant
        self._delivery = Delivery(store, accountant, end_sequence)
        self._maker = SequenceMaker(decoder, template)

    async def run(self, inbox: Receiver[DetokenizerMessage]) -> None:
        """Detokenize until cancelled."""
        store, pending = self._store, self._store.pending
        await self._repair()
        while True:
            while pending:
                await self._handle(pending[0])
                store.take_off()
            pending.extend(map(PendingTexts, await inbox.receive_all(self._take_now)))

    def _take_now(self, message: DetokenizerMessage) -> bool:
        """Note a message, and handle it in its sender's task if that is quick. Return whether it is handled."""
        pending = PendingTexts(message)
        self._store.pending.append(pending)
        if not self._handle_now(pending):
            return False
        self._store.take_off()
        return True

    def _handle_now(self, pending: PendingTexts) -> bool:
        """Decode a small step; return whether it was one and all is sent. If not, `_handle` does the rest."""
        tokens = pending.message
        if not isinstance(tokens, Tokens) or tokens.payloads or len(tokens.sequence_ids) > MAX_ROWS_NOW:
            return False
        return self._decode_slice(pending, tokens)

    async def _handle(self, pending: PendingTexts) -> None:
        match pending.message:
            case Tokens() as tokens:
                await self._decode(pending, tokens)
            case Track() as track:
                self._track(track)
            case Forget() as forget:
                for sequence_id in forget.sequence_ids:
                    self._delivery.forget(sequence_id)

    # ------------------------------------------------------------ new sequences

    def _track(self, message: Track) -> None:
        store = self._store
        store.in_hand = message
        if message.request_id in store.refused:
            self._accountant.post(Completed(message.request_id, message.sequence_id, 0, None))
        elif message.sequence_id not in store.tracked:
            prompt, stops = self._prompt_of(message), self._stops_of(message)
            store.tracked[message.sequence_id] = self._maker.sequence(message, stops, prompt)

    def _prompt_of(self, message: Track) -> PromptAssembler | PromptVector | None:
        """Return the prompt that the choice begins with, or None if it is neither echoed, scored nor embedded."""
        prompts, token_text = self._store.prompts, self._maker.token_text
        if message.wants_vector:
            return prompts.setdefault(message.sequence_id, PromptVector(message.request_id))
        leader_id = message.scores_from
        if leader_id is None:
            return None if message.echo is None else PromptAssembler(token_text, message.echo, 0)
        prompt = prompts.get(leader_id)
        if prompt is None:
            prompt = PromptAssembler(token_text, message.echo, message.num_prompt_scores, message.request_id)
            prompts[leader_id] = prompt
        return prompt

    def _stops_of(self, message: Track) -> StopStrings | None:
        if not message.stop:
            return None
        known = self._store.stops
        stops = known.get(message.request_id)
        if stops is None:
            stops = known[message.request_id] = StopStrings(message.stop)
        return stops

    # ------------------------------------------------------------ a step's tokens

    async def _decode(self, pending: PendingTexts, tokens: Tokens) -> None:
        """Decode and send a step's tokens from where it was left, with checkpoints if there are many."""
        if tokens.payloads:
            self._delivery.add_payloads(tokens.payloads)
            self._catch_up()
            if pending.scored is None:
                pending.scored = output_scores(tokens.payloads)
        while not self._decode_slice(pending, tokens):
            await trio.lowlevel.checkpoint()

    def _decode_slice(self, pending: PendingTexts, tokens: Tokens) -> bool:
        """Decode and send tokens for SLICE_S, from where it was left; return whether all of them are sent."""
        slice_end, begun_at = time.perf_counter() + SLICE_S, pending.next_token
        store, give = self._store, self._delivery.give
        tracked = store.tracked
        reasons = dict(zip(tokens.ended_ids, tokens.ended_reasons, strict=True))
        last = {sequence_id: at for at, sequence_id in enumerate(tokens.sequence_ids)} if reasons else {}
        rows = enumerate(zip(tokens.sequence_ids, tokens.token_ids, strict=True))
        for at, (sequence_id, token_id) in islice(rows, begun_at, None):
            sequence = tracked.get(sequence_id)
            if sequence is None:
                continue
            if at > begun_at and time.perf_counter() > slice_end:
                pending.next_token = at
                return False
            store.in_hand = sequence
            ended = reasons.get(sequence_id) if reasons and last.get(sequence_id) == at else None
            try:
                give(sequence, token_id, None if ended is None else FinishReason(ended), pending, at)
            except FAILURES as error:
                self._fail(sequence, error)
        if len(reasons) > len(last.keys() & reasons.keys()):
            self._end_prompts([sequence_id for sequence_id in tokens.ended_ids if sequence_id not in last])
        return True

    def _end_prompts(self, sequence_ids: list[int]) -> None:
        for sequence in filter(None, map(self._store.tracked.get, sequence_ids)):
            self._store.in_hand = sequence
            try:
                self._delivery.end_without_output(sequence)
            except FAILURES as error:
                self._fail(sequence, error)

    def _catch_up(self) -> None:
        """Send what waited for prompts that are complete now."""
        store = self._store
        for leader_id in list(store.deferred):
            if not store.prompts[leader_id].is_complete:
                continue
            waiting = store.deferred[leader_id]
            while waiting:
                store.in_hand = waiting[0]
                try:
                    if waiting[0].request_id not in store.refused:
                        self._delivery.catch_up(waiting[0])
                except OutletFailed as error:
                    self._fail(waiting[0], error)
                waiting.popleft()
            del store.deferred[leader_id]

    def _fail(self, sequence: TrackedSequence, cause: BaseException) -> None:
        cause = cause.__cause__ or cause
        log.error("detokenizer.failed", request_id=sequence.request_id, error_type=type(cause).__name__)
        self._delivery.fail(sequence.request_id, [sequence])

    # ------------------------------------------------------------ after a death

    async def _repair(self) -> None:
        """Deal with what a predecessor had in hand when it died."""
        store = self._store
        torn = store.torn
        if torn is None:
            return
        store.in_hand = torn
        for request_id in store.culprits:
            store.note_refused(request_id)
            self._delivery.fail(request_id, [s for s in store.tracked.values() if s.request_id == request_id])
        if isinstance(torn, TrackedSequence) and torn.sequence_id in store.tracked:
            if torn.reason is not None:
                self._delivery.complete(torn)
            else:
                try:
                    await self._make_again(torn)
                except FAILURES as error:
                    self._fail(torn, error)
        store.in_hand = store.torn = None

    async def _make_again(self, sequence: TrackedSequence) -> None:
        """Make the stream of a sequence again, and give it the tokens that its client has been given."""
        slice_end = time.perf_counter() + SLICE_S
        stream = self._maker.stream(sequence.track, sequence.stops)
        logprobs = self._maker.logprobs(sequence.track, sequence.num_prompt_characters)
        for token_id in sequence.token_ids:
            stream.push(token_id)
            if logprobs is not None:
                logprobs.skip(token_id)
            if time.perf_counter() > slice_end:
                await trio.lowlevel.checkpoint()
                slice_end = time.perf_counter() + SLICE_S
        sequence.stream, sequence.logprobs = stream, logprobs
