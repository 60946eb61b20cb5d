"""Sends each sequence's text to its outlet, token by token, and notes in the text store what was sent.

Used by the detokenizer. Everything about a token that may raise is computed first; then the outlet gets it and the
store notes it, in one step. Completing a sequence is another step, which may be repeated.

What must always hold: an outlet gets each token once and in order, and nothing after the delta with a finish reason;
what follows a stop string is neither shown nor counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from ..channel import Poster
from ..messages.accountant import Completed, Refused
from ..messages.handler import Delta, OfPrompt, ScoredDelta
from ..messages.outcomes import ErrorKind, FinishReason, RequestError
from ..messages.scores import ScoredToken, Scores, StepPayloads
from .prompt_vector import PromptVector
from .text_store import PendingTexts, TextStore
from .tracked_sequence import TrackedSequence

UNDECODABLE = RequestError(ErrorKind.INTERNAL, "The output tokens could not be decoded.")


class OutletFailed(Exception):
    """A client's own handler raised while consuming a delta. How much it consumed is unknown, so its request fails."""


class Delivery:
    def __init__(
        self, store: TextStore, accountant: Poster[Completed | Refused], end_sequence: Callable[[int], None]
    ) -> None:
        self._store = store
        self._accountant = accountant
        self._end_sequence = end_sequence

    def give(
        self, sequence: TrackedSequence, token_id: int, reason: FinishReason | None, pending: PendingTexts, at: int
    ) -> None:
        """Send a sequence its next token, which is at index `at` of a message; with the last one, what was held back.

        Raises OutletFailed, and what its stream raises.
        """
        if not sequence.is_begun:
            self._begin(sequence)
            if sequence.track.prompt_only:
                self._end_prompt(sequence)
                pending.next_token = at + 1
                return
        scored = pending.scored and sequence.logprobs and pending.scored.get(sequence.sequence_id)
        scores: tuple[ScoredToken, ...] = ()
        if scored and sequence.logprobs is not None:
            scores = (sequence.logprobs.next_token(*scored[0]),)
        stream, track = sequence.stream, sequence.track
        is_shown = reason is not FinishReason.STOP or track.include_stop  # a stop token is counted, not shown
        piece = stream.push(token_id) if is_shown else stream.push_hidden(token_id)
        if reason is not None and not piece.is_complete:
            piece = piece.joined(stream.flush())
        stop_token_id = token_id if reason is FinishReason.STOP and piece.match is None else None
        if piece.is_complete:
            if reason is None:
                self._end_sequence(sequence.sequence_id)
            reason = FinishReason.STOP
        num_reasoning = stream.num_reasoning_tokens
        num_new = num_reasoning - sequence.num_reasoning_tokens
        token_ids = (token_id,) if sequence.with_token_ids else ()
        told = (track.index, piece.text, 1, reason, piece.match, piece.events, num_new, token_ids, stop_token_id)
        delta = ScoredDelta(*told, scores=scores) if scores else Delta(*told)
        if sequence.waiting is None:
            try:
                track.outlet.put(delta)
            except Exception as error:
                raise OutletFailed from error
        else:
            sequence.waiting.append(delta)
        sequence.token_ids.append(token_id)
        sequence.num_reasoning_tokens = num_reasoning
        pending.next_token = at + 1
        if scored:
            scored.popleft()
        if reason is not None:
            sequence.reason = reason
            self.complete(sequence)

    def end_without_output(self, sequence: TrackedSequence) -> None:
        """Send the end of a sequence that has no token. Raises OutletFailed."""
        self._begin(sequence)
        self._end_prompt(sequence)

    def _end_prompt(self, sequence: TrackedSequence) -> None:
        delta = Delta(sequence.track.index, "", 0, FinishReason.LENGTH)
        if sequence.waiting is None:
            self._put(sequence, delta)
        else:
            sequence.waiting.append(delta)
        sequence.reason = FinishReason.LENGTH
        self.complete(sequence)

    def _begin(self, sequence: TrackedSequence) -> None:
        """Send what comes before the first token; if its prompt is incomplete, both wait."""
        if sequence.waiting is None:
            if sequence.prompt is None or sequence.prompt.is_complete:
                self._send_prompt(sequence)
            else:
                sequence.waiting = deque()
                self._store.deferred.setdefault(sequence.leader_id, deque()).append(sequence)
        sequence.is_begun = not sequence.track.prompt_only

    def _send_prompt(self, sequence: TrackedSequence) -> None:
        prompt, token_ids = sequence.prompt, sequence.prompt_token_ids
        text, scores, vector = "", None, None
        if isinstance(prompt, PromptVector):
            vector = prompt.vector
        elif prompt is not None and (prompt.text or len(prompt.scores)):
            text, scores = prompt.text, prompt.scores
        if scores is not None or token_ids is not None or vector is not None:
            of_prompt = OfPrompt(scores, token_ids, vector)
            self._put(sequence, ScoredDelta(sequence.track.index, text, 0, None, of_prompt=of_prompt))
        sequence.prompt = sequence.prompt_token_ids = None

    def _put(self, sequence: TrackedSequence, delta: Delta) -> None:
        try:
            sequence.track.outlet.put(delta)
        except Exception as error:
            raise OutletFailed from error

    # ------------------------------------------------------------ payloads

    def add_payloads(self, steps: Iterable[StepPayloads]) -> None:
        """Add what was yielded for prompts, or parts of them, to these, each once: scores and vectors."""
        store = self._store
        for step in steps:
            for leader_id, end, payload in zip(step.ids, step.ends, step.payloads, strict=True):
                prompt = store.prompts.get(leader_id)
                if prompt is not None and prompt.request_id not in store.refused:
                    store.in_hand = prompt
                    prompt.add(end, payload)

    def catch_up(self, sequence: TrackedSequence) -> None:
        """Send the deltas of a sequence, perhaps all of them, that waited for its prompt. Raises OutletFailed."""
        self._send_prompt(sequence)
        waiting = sequence.waiting
        while waiting:
            self._put(sequence, waiting[0])
            waiting.popleft()
        sequence.waiting = None

    # ------------------------------------------------------------ the end

    def complete(self, sequence: TrackedSequence) -> None:
        """Tell the accountant, once, that a sequence is complete."""
        if sequence.sequence_id in self._store.tracked:
            self._accountant.post(
                Completed(
                    sequence.request_id,
                    sequence.sequence_id,
                    sequence.num_tokens,
                    sequence.reason,
                    sequence.num_reasoning_tokens,
                )
            )
            self._store.untrack(sequence)

    def fail(self, request_id: str, sequences: Iterable[TrackedSequence]) -> None:
        """Fail a request whose tokens cannot be decoded, parsed or sent, because of a bug, and end its sequences."""
        self._accountant.post(Refused(request_id, UNDECODABLE))
        for sequence in sequences:
            self.complete(sequence)

    def forget(self, sequence_id: int) -> None:
        store = self._store
        store.prompts.pop(sequence_id, None)
        store.deferred.pop(sequence_id, None)
        sequence = store.tracked.get(sequence_id)
        if sequence is not None:
            self.complete(sequence)


def output_scores(steps: Iterable[StepPayloads]) -> dict[int, deque[tuple[Scores, int]]]:
    """Return the scores of outputs by sequence, in order."""
    scored: dict[int, deque[tuple[Scores, int]]] = {}
    for step in steps:
        for at, sequence_id in enumerate(step.drawn_ids):
            scored.setdefault(sequence_id, deque()).append((step.drawn, at))
    return scored
