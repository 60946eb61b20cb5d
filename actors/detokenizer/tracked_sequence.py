"""The detokenizer's state of one sequence, and how it is made from its `Track`, at first and after a death."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import attrs

from ..messages.detokenizer import Track
from ..messages.handler import Delta
from ..messages.outcomes import FinishReason
from ..shared.token_decoding import TokenDecoder, TokenText
from .decoder import Decoder
from .logprob_assembler import LogprobAssembler, PromptAssembler
from .parsed_stream import ParsedStream
from .prompt_vector import PromptVector
from .response_parsing.response_parser import ResponseParser
from .response_parsing.response_template import ResponseTemplate
from .stop_strings import StopStrings
from .text_stream import StopMatcher, TextStream

MAX_CACHED_TEXTS = 1 << 16
"""Tokens whose text is cached for logprobs: a whole vocabulary, or its common part."""


@attrs.define(eq=False)
class TrackedSequence:
    track: Track
    """Without the prompt."""
    request_id: str
    sequence_id: int
    stream: TextStream | ParsedStream
    logprobs: LogprobAssembler | None
    """None if no logprobs were requested."""
    stops: StopStrings | None
    is_begun: bool
    """What comes before its first token was sent, or was deferred."""
    prompt_token_ids: Sequence[int] | None
    """Its prompt, which is sent first. None if it is not wanted, or has been sent."""
    prompt: PromptAssembler | PromptVector | None
    """The same, with text or scores; or its vector."""
    with_token_ids: bool
    num_prompt_characters: int
    waiting: deque[Delta] | None = None
    """Deltas that wait for an incomplete prompt."""
    token_ids: array[int] = attrs.field(factory=lambda: array("I"))
    """The tokens of all its deltas."""
    num_reasoning_tokens: int = 0
    reason: FinishReason | None = None
    """Why it ended, once its last delta was sent."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def leader_id(self) -> int:
        """The sequence with which its prompt is scored."""
        return self.sequence_id if self.track.scores_from is None else self.track.scores_from


class SequenceMaker:
    def __init__(self, decoder: Decoder, template: ResponseTemplate | None) -> None:
        self._decoder = decoder
        self._template = template
        self.token_text: Callable[[int], TokenText] = lru_cache(MAX_CACHED_TEXTS)(decoder.token_text)

    def sequence(
        self, track: Track, stops: StopStrings | None, prompt: PromptAssembler | PromptVector | None
    ) -> TrackedSequence:
        kept = track
        if track.echo is not None or track.prompt_token_ids is not None:
            kept = attrs.evolve(track, echo=None, prompt_token_ids=None)
        num_prompt_characters = 0 if prompt is None else len(prompt.text)
        return TrackedSequence(
            track=kept,
            request_id=track.request_id,
            sequence_id=track.sequence_id,
            stream=self.stream(track, stops),
            logprobs=self.logprobs(track, num_prompt_characters),
            stops=stops,
            is_begun=track.prompt_token_ids is None and prompt is None and not track.prompt_only,
            prompt_token_ids=track.prompt_token_ids,
            prompt=prompt,
            with_token_ids=track.prompt_token_ids is not None,
            num_prompt_characters=num_prompt_characters,
        )

    def stream(self, track: Track, stops: StopStrings | None) -> TextStream | ParsedStream:
        decoder = self._make_decoder(track)
        matcher = StopMatcher(stops, include=track.include_stop, num_ignored=track.min_tokens)
        if track.output is None or self._template is None:
            return TextStream(decoder, matcher)
        prompt_tail = [(token_id, self.token_text(token_id).text) for token_id in track.prompt_tail]
        parser = ResponseParser(self._template, track.output.tool_types, prompt_tail)
        return ParsedStream(decoder, parser, matcher, track.output.max_calls)

    def logprobs(self, track: Track, num_prompt_characters: int) -> LogprobAssembler | None:
        if not track.is_scored:
            return None
        return LogprobAssembler(self.token_text, self._make_decoder(track), num_prompt_characters)

    def _make_decoder(self, track: Track) -> TokenDecoder:
        return self._decoder.make_decoder(skip_special_tokens=track.skip_special_tokens, prompt_tail=track.prompt_tail)
