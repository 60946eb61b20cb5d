"""From how a request's tokens are to be drawn to how those of each of its sequences are.

Used by the tokenizer, which alone knows what a bad word is in tokens, which tokens end a sequence, and which sequences
a request has.

What must always hold: each sequence has a key of its own, made from the request's seed and its place in the request
alone: whoever sends a request again with its seed gets the same draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import attrs

from ..messages.outcomes import ErrorKind, RequestError
from ..messages.sampling import LogitRules, SamplingParams

TokenIds = tuple[int, ...]


def sequence_seed(seed: int, prompt: int, choice: int) -> int:
    """64 bits for one sequence of a request: those of the request for its first, no two alike for the others."""
    if prompt == choice == 0:
        return seed
    place = seed.to_bytes(8, "little") + prompt.to_bytes(4, "little") + choice.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little")


def recorded_seed(seed: int) -> int:
    """A request's 64 bits as records have them, and as OpenAI's API takes them back: signed."""
    return seed - (1 << 64) if seed >> 63 else seed


def complete_rules(
    sampling: SamplingParams, bad_words: Sequence[TokenIds], eos_token_ids: Iterable[int], vocab_size: int
) -> SamplingParams:
    """`sampling` with bad words as tokens, and with what its minimum of tokens holds back."""
    rules = sampling.rules or LogitRules()
    if not bad_words and not rules.min_tokens:
        return sampling
    ending = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    # a tokenizer may know ids that the model does not
    words = tuple(dict.fromkeys(word for word in bad_words if max(word) < vocab_size))
    held_back = tuple(sorted(i for i in ending if i < vocab_size)) if rules.min_tokens else ()
    return attrs.evolve(sampling, rules=attrs.evolve(rules, bad_words=words, held_back_token_ids=held_back))


def contradiction(rules: LogitRules | None) -> RequestError | None:
    """Why no first token could be drawn."""
    if rules is None or not rules.allowed_token_ids:
        return None
    banned = {word[0] for word in rules.bad_words if len(word) == 1}.union(rules.held_back_token_ids)
    if not banned.issuperset(rules.allowed_token_ids):
        return None
    message = (
        "allowed_token_ids leaves no token to begin with: each is one of bad_words, or would end the output before "
        "min_tokens"
    )
    return RequestError(ErrorKind.INVALID, message, "allowed_token_ids")
