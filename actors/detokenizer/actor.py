"""The detokenizer: from token ids to text, and on to each request's outlet.

One inbox receives `Track` (just before a sequence is submitted), `Tokens` (one message per step, after the accountant
has booked the step) and `Forget` (the request is over). For each sequence it tells the accountant how many tokens the
client was given and why it ended (`Completed`), and before that, if its tokens cannot be decoded, that the request has
failed (`Refused`). It has the engine end a sequence whose stop string is complete.

A prompt that is echoed or scored is assembled once, with its first choice. Its other choices may be ahead, with blocks
from the cache: their deltas wait until the prompt, with which every choice begins, is complete.

What must always hold: an outlet gets nothing after the delta with a finish reason; what follows a stop string is
neither shown nor counted; a failing sequence does not affect others; a step holds the event loop for at most SLICE_S.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from weakref import WeakValueDictionary

import structlog
import trio

from ..channel import Poster, Receiver
from ..messages.accountant import Completed, Refused
from ..messages.detokenizer import Forget, Tokens, Track
from ..messages.handler import Delta, ScoredDelta
from ..messages.outcomes import ErrorKind, FinishReason, RequestError
from ..messages.scores import ScoredToken, Scores, StepScores
from ..shared.tokenizers_library import LibraryPanic
from .decoder import Decoder
from .logprob_assembler import LogprobAssembler, PromptAssembler
from .parsed_stream import ParserFailed
from .response_parsing.response_template import ResponseTemplate
from .stop_strings import StopStrings
from .tracked_sequence import TrackedSequence, make_stream

log = structlog.get_logger()

DetokenizerMessage = Track | Tokens | Forget

SLICE_S = 0.002
"""How long a step's tokens may hold the event loop without a checkpoint."""
MAX_CACHED_TEXTS = 1 << 16
"""Tokens whose text is cached for logprobs: a whole vocabulary, or its common part."""


class Detokenizer:
    def __init__(
        self,
        decoder: Decoder,
        accountant: Poster[Completed | Refused],
        end_sequence: Callable[[int], None],
        template: ResponseTemplate | None = None,
    ) -> None:
        """`end_sequence(sequence_id)` has the engine end a sequence; it never blocks.

        `template`: how the model writes reasoning and calls. None: all of its output is text.
        """
        self._decoder = decoder
        self._accountant = accountant
        self._end_sequence = end_sequence
        self._template = template
        self._tracked: dict[int, TrackedSequence] = {}
        self._stops: WeakValueDictionary[str, StopStrings] = WeakValueDictionary()
        """By request: all its sequences share one."""
        self._prompts: dict[int, PromptAssembler] = {}
        """By the sequence with which it is scored, until the request is over: a choice may come late."""
        self._deferred: dict[int, list[TrackedSequence]] = {}
        """Sequences that wait for a prompt, by the sequence with which it is scored."""
        self._token_text = lru_cache(MAX_CACHED_TEXTS)(decoder.token_text)

    @property
    def num_tracked(self) -> int:
        return len(self._tracked)

    @property
    def num_prompts(self) -> int:
        """Prompts whose scores are kept for choices that may still come."""
        return len(self._prompts)

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
            self._decoder.make_decoder,
            skip_special_tokens=message.skip_special_tokens,
            prompt_tail=message.prompt_tail,
        )
        prompt = self._prompt_of(message)
        logprobs = None
        if message.is_scored:
            logprobs = LogprobAssembler(self._token_text, make_decoder(), 0 if prompt is None else len(prompt.text))
        self._tracked[message.sequence_id] = TrackedSequence(
            request_id=message.request_id,
            sequence_id=message.sequence_id,
            index=message.index,
            stream=make_stream(message, make_decoder(), self._stops_of(message), self._template, self._token_text),
            include_stop=message.include_stop,
            outlet=message.outlet,
            logprobs=logprobs,
            leader_id=message.sequence_id if message.scores_from is None else message.scores_from,
            prompt=prompt,
            prompt_only=message.prompt_only,
            prompt_token_ids=message.prompt_token_ids,
            with_token_ids=message.prompt_token_ids is not None,
        )

    def _prompt_of(self, message: Track) -> PromptAssembler | None:
        """Return the prompt that the choice begins with, or None if it is neither echoed nor scored."""
        leader_id = message.scores_from
        if leader_id is None:
            return None if message.echo is None else PromptAssembler(self._token_text, message.echo, 0)
        prompt = self._prompts.get(leader_id)
        if prompt is None:
            prompt = PromptAssembler(self._token_text, message.echo, message.num_prompt_scores)
            self._prompts[leader_id] = prompt
        return prompt

    def _stops_of(self, message: Track) -> StopStrings | None:
        if not message.stop:
            return None
        stops = self._stops.get(message.request_id)
        if stops is None:
            stops = self._stops[message.request_id] = StopStrings(message.stop)
        return stops

    async def _decode(self, tokens: Tokens) -> None:
        """Decode and send a step's tokens, with checkpoints if there are many."""
        slice_end = time.perf_counter() + SLICE_S
        scored = self._sort_scores(tokens.scores) if tokens.scores else {}
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
                self._handle_token(sequence, token_id, reason, scored.get(sequence_id))
            except (LibraryPanic, ParserFailed) as error:
                self._fail(sequence, error)

    def _handle_token(
        self,
        sequence: TrackedSequence,
        token_id: int,
        reason: FinishReason | None,
        scored: deque[tuple[Scores, int]] | None,
    ) -> None:
        """Send one token of a sequence, after the prompt if it begins with one."""
        if sequence.prompt_token_ids is not None:
            ids, sequence.prompt_token_ids = sequence.prompt_token_ids, None
            sequence.outlet.put(ScoredDelta(sequence.index, "", 0, None, prompt_token_ids=ids))
        if sequence.prompt is not None:
            self._begin(sequence, sequence.prompt)
        if sequence.prompt_only:
            self._send(sequence, Delta(sequence.index, "", 0, FinishReason.LENGTH))
            self._complete(sequence, FinishReason.LENGTH)
            return
        scores: tuple[ScoredToken, ...] = ()
        if sequence.logprobs is not None and scored:
            scores = (sequence.logprobs.next_token(*scored.popleft()),)
        self._send_token(sequence, token_id, reason, scores)

    def _sort_scores(self, steps: list[StepScores]) -> dict[int, deque[tuple[Scores, int]]]:
        """Add the scores of prompts to their prompts. Return the scores of outputs by sequence, in order."""
        scored: dict[int, deque[tuple[Scores, int]]] = {}
        for step in steps:
            for leader_id, position, prompt in zip(step.prompt_ids, step.prompt_positions, step.prompts, strict=True):
                assembler = self._prompts.get(leader_id)
                if assembler is None:
                    continue
                assembler.add(position, prompt)
                if assembler.is_complete:
                    for sequence in self._deferred.pop(leader_id, ()):
                        self._catch_up(sequence, assembler)
            for at, sequence_id in enumerate(step.drawn_ids):
                scored.setdefault(sequence_id, deque()).append((step.drawn, at))
        return scored

    def _begin(self, sequence: TrackedSequence, prompt: PromptAssembler) -> None:
        """Send the prompt before the first token; if it is incomplete, both wait."""
        sequence.prompt = None
        if prompt.is_complete:
            self._send_prompt(sequence, prompt)
        else:
            sequence.waiting = []
            self._deferred.setdefault(sequence.leader_id, []).append(sequence)

    def _send_prompt(self, sequence: TrackedSequence, prompt: PromptAssembler) -> None:
        if prompt.text or len(prompt.scores):
            sequence.outlet.put(ScoredDelta(sequence.index, prompt.text, 0, None, prompt_scores=prompt.scores))

    def _catch_up(self, sequence: TrackedSequence, prompt: PromptAssembler) -> None:
        """Send the deltas of a sequence, perhaps all of them, that waited for its prompt."""
        self._send_prompt(sequence, prompt)
        waiting, sequence.waiting = sequence.waiting or [], None
        for delta in waiting:
            sequence.outlet.put(delta)

    def _send(self, sequence: TrackedSequence, delta: Delta) -> None:
        if sequence.waiting is None:
            sequence.outlet.put(delta)
        else:
            sequence.waiting.append(delta)

    def _send_token(
        self,
        sequence: TrackedSequence,
        token_id: int,
        reason: FinishReason | None,
        scores: tuple[ScoredToken, ...] = (),
    ) -> None:
        """Send one token's text; with the last token, everything that was held back."""
        sequence.num_tokens += 1
        is_shown = reason is not FinishReason.STOP or sequence.include_stop  # a stop token is counted, not shown
        piece = sequence.stream.push(token_id) if is_shown else sequence.stream.push_hidden(token_id)
        if reason is not None and not piece.is_complete:
            piece = piece.joined(sequence.stream.flush())
        if piece.is_complete:
            if reason is None:
                self._end_sequence(sequence.sequence_id)
            reason = FinishReason.STOP
        num_reasoning = sequence.stream.num_reasoning_tokens - sequence.num_reasoning_tokens
        sequence.num_reasoning_tokens += num_reasoning
        told = (sequence.index, piece.text, 1, reason, piece.match, piece.events, num_reasoning)
        token_ids = (token_id,) if sequence.with_token_ids else ()
        if scores:
            self._send(sequence, ScoredDelta(*told, token_ids, scores=scores))
        else:
            self._send(sequence, Delta(*told, token_ids))
        if reason is not None:
            self._complete(sequence, reason)

    def _forget(self, sequence_id: int) -> None:
        self._prompts.pop(sequence_id, None)
        self._deferred.pop(sequence_id, None)
        sequence = self._tracked.get(sequence_id)
        if sequence is not None:
            self._complete(sequence, None)

    def _fail(self, sequence: TrackedSequence, cause: BaseException) -> None:
        """Fail a request whose tokens cannot be decoded or parsed, because of a bug."""
        cause = cause.__cause__ or cause
        log.error("detokenizer.failed", request_id=sequence.request_id, error_type=type(cause).__name__)
        error = RequestError(ErrorKind.INTERNAL, "The output tokens could not be decoded.")
        self._accountant.post(Refused(sequence.request_id, error))
        self._complete(sequence, None)

    def _complete(self, sequence: TrackedSequence, reason: FinishReason | None) -> None:
        del self._tracked[sequence.sequence_id]
        self._accountant.post(
            Completed(
                sequence.request_id, sequence.sequence_id, sequence.num_tokens, reason, sequence.num_reasoning_tokens
            )
        )
