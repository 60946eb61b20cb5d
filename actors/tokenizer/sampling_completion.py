"""Complete a request's sampling parameters once its prompts and bad words are encoded.

Used by the tokenizer: rules name tokens by id, a budget of reasoning and a grammar know what delimits reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import attrs

from ..config.runtime_config import RuntimeConfig
from ..messages.outcomes import RequestError
from ..messages.output import OutputFormat
from ..messages.sampling import SamplingParams
from ..messages.tokenizer import Encode
from .encoder import TextEncoder
from .prompt_encoder import owner_of
from .sampling_rules import TokenIds, complete_rules, contradiction
from .thinking_budget import encode_delimiters, limit_reasoning, place_grammar


class SamplingCompleter:
    def __init__(self, config: RuntimeConfig, encoder: TextEncoder) -> None:
        """`encoder` encodes the delimiters of reasoning."""
        self._config = config
        self._delimiters = cache(lambda tags: encode_delimiters(tags, encoder, config.vocab_size))

    def complete(
        self,
        request: Encode,
        bad_words: Sequence[TokenIds],
        grammar: str | None,
        output: OutputFormat,
        max_model_len: int,
    ) -> SamplingParams | RequestError:
        """Return the request's sampling parameters, with all that its rules name as ids, or why it cannot be served.

        `grammar`: the request's, as text for the engine. `output`: how the model writes reasoning.
        """
        config = self._config
        sampling = complete_rules(request.sampling, bad_words, config.engine.eos_token_ids, config.vocab_size)
        budget, tags = request.thinking_budget, output.reasoning_tags
        if budget is not None and tags is not None:
            sampling = limit_reasoning(sampling, budget, self._delimiters(tags), max_model_len)
        if (conflict := contradiction(sampling.rules)) is not None:
            return conflict
        if grammar is None:
            return sampling
        # without these, all of the output is its answer
        delimiters = None if request.output is None or tags is None else self._delimiters(tags)
        return attrs.evolve(sampling, grammar=place_grammar(grammar, request.domain, owner_of(request), delimiters))
