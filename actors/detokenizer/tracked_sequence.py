"""What the detokenizer holds of one sequence, and the stream that reads its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from ..messages.detokenizer import Track
from ..messages.handler import Delta, Outlet
from ..shared.token_decoding import TokenDecoder, TokenText
from .logprob_assembler import LogprobAssembler, PromptAssembler
from .parsed_stream import ParsedStream
from .response_parsing.response_parser import ResponseParser
from .response_parsing.response_template import ResponseTemplate
from .stop_strings import StopStrings
from .text_stream import StopMatcher, TextStream


@attrs.define(eq=False)
class TrackedSequence:
    request_id: str
    sequence_id: int
    index: int
    stream: TextStream | ParsedStream
    include_stop: bool
    outlet: Outlet
    logprobs: LogprobAssembler | None = None
    """None if no logprobs were requested."""
    leader_id: int = 0
    """The sequence with which its prompt is scored."""
    prompt: PromptAssembler | None = None
    """Its prompt, which is sent first. None if it is not wanted, or has been sent or deferred."""
    waiting: list[Delta] | None = None
    """Deltas that wait for an incomplete prompt."""
    prompt_only: bool = False
    prompt_token_ids: Sequence[int] | None = None
    """Its prompt, which is sent first. None if it is not wanted, or has been sent."""
    with_token_ids: bool = False
    num_tokens: int = 0
    num_reasoning_tokens: int = 0


def make_stream(
    message: Track,
    decoder: TokenDecoder,
    stops: StopStrings | None,
    template: ResponseTemplate | None,
    token_text: Callable[[int], TokenText],
) -> TextStream | ParsedStream:
    """Return the stream that reads the output of a sequence.

    `template`: how the model writes reasoning and calls. None: all of the output is text.
    """
    matcher = StopMatcher(stops, include=message.include_stop, num_ignored=message.min_tokens)
    if message.output is None or template is None:
        return TextStream(decoder, matcher)
    prompt_tail = [(token_id, token_text(token_id).text) for token_id in message.prompt_tail]
    parser = ResponseParser(template, message.output.tool_types, prompt_tail)
    return ParsedStream(decoder, parser, matcher, message.output.max_calls)
