"""Completes a request's sampling parameters once its prompts and bad words are encoded.

Used by the tokenizer: rules name tokens by id, and a budget of reasoning and a grammar need its delimiters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import attrs

from ..config.runtime_config import RuntimeConfig
from ..messages.outcomes import ErrorKind, RequestError
from ..messages.output import OutputFormat
from ..messages.sampling import LogitRules, SamplingParams
from ..messages.tokenizer import Encode
from .encoder import TextEncoder
from .prompt_encoder import owner_of
from .thinking_budget import encode_delimiters, limit_reasoning, place_grammar

TokenIds = tuple[int, ...]


def complete_rules(
    sampling: SamplingParams, bad_words: Sequence[TokenIds], eos_token_ids: Iterable[int], vocab_size: int
) -> SamplingParams:
    """Add the encoded bad words to `sampling`, and the end tokens that `min_tokens` suppresses."""
    rules = sampling.rules or LogitRules()
    if not bad_words and not rules.min_tokens:
        return sampling
    end_token_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    # a tokenizer may have ids that the model does not
    words = tuple(dict.fromkeys(word for word in bad_words if max(word) < vocab_size))
    suppressed = tuple(sorted(i for i in end_token_ids if i < vocab_size)) if rules.min_tokens else ()
    return attrs.evolve(sampling, rules=attrs.evolve(rules, bad_words=words, held_back_token_ids=suppressed))


def contradiction(rules: LogitRules | None) -> RequestError | None:
    """Return an error if the rules leave no token that could be sampled first."""
    if rules is None or not rules.allowed_token_ids:
        return None
    banned = {word[0] for word in rules.bad_words if len(word) == 1}.union(rules.held_back_token_ids)
    if not banned.issuperset(rules.allowed_token_ids):
        return None
    message = (
        "Invalid value for `allowed_token_ids`: at least one token must be neither one of `bad_words` nor end the "
        "output before `min_tokens`."
    )
    return RequestError(ErrorKind.INVALID, message, "allowed_token_ids")


class SamplingCompleter:
    def __init__(self, config: RuntimeConfig, encoder: TextEncoder) -> None:
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
        """Return the request's sampling parameters, with ids in its rules, or why it cannot be served.

        `grammar` is text for the engine, `output` says how the model writes reasoning.
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
