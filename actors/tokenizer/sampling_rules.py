"""Complete a request's sampling parameters with what only the tokenizer knows: bad words and end tokens as ids.

Used by the tokenizer once a request's prompts and bad words are encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from ..messages.outcomes import ErrorKind, RequestError
from ..messages.sampling import LogitRules, SamplingParams

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
