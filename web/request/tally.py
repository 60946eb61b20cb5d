"""The usage of a request that is still running, added up from its outlet's events."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from quipu.actors.messages.handler import Delta, PromptNumbers, Started


@attrs.define
class Tally:
    """Running usage of one request."""

    prompt_tokens: int | None = None
    """Sum over the prompts admitted so far. None: none has been admitted yet."""
    cached_tokens: int | None = None
    """As counted by engines; None if one of them does not count."""
    cache_write_tokens: int | None = None
    cached_tokens_estimate: int | None = None
    created_5m_tokens: int = 0
    created_1h_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Part of the completion tokens."""
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    """Known from the record only."""
    by_prompt: Mapping[int, PromptNumbers] = attrs.field(factory=dict)

    def start(self, event: Started) -> None:
        """Replace the sums over prompts by those of `event`."""
        self.prompt_tokens = event.prompt_tokens
        self.cached_tokens = event.cached_tokens
        self.cached_tokens_estimate = event.cached_tokens_estimate
        self.cache_write_tokens = event.cache_write_tokens
        self.created_5m_tokens = event.created_5m_tokens
        self.created_1h_tokens = event.created_1h_tokens
        self.by_prompt = event.by_prompt

    def of_prompt(self, index: int) -> PromptNumbers | None:
        """Return the numbers of one prompt; None before it is admitted."""
        if self.by_prompt or self.prompt_tokens is None:
            return self.by_prompt.get(index)
        return PromptNumbers(self.prompt_tokens, self.cached_tokens)

    def add(self, delta: Delta) -> None:
        self.completion_tokens += delta.num_tokens
        self.reasoning_tokens += delta.num_reasoning_tokens
