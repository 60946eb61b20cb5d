"""How tokens are drawn: the fields of OpenAI's API and vLLM's that say so, the same on every endpoint of this folder.

What is read here is checked completely: nothing below the web layer looks at it again, and a value that an executor
could not take would fail the step of all its neighbours. Bad words are only counted here; the tokenizer makes tokens
of them.
"""

from __future__ import annotations

import math
import re
from typing import Any

from quipu.actors.messages.sampling import LogitRules, SamplingParams
from quipu.actors.request_desk.interface import ServingInfo

from ...request.errors import invalid
from ..fields import Fields, token_ids, wrong_type
from ..generation import WantedScores, read_seed

MAX_STOP_TOKEN_IDS = 256
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_NO_RULES = LogitRules()


def read_sampling(
    fields: Fields, info: ServingInfo, *, max_tokens: int | None, max_tokens_param: str, scores: WantedScores
) -> SamplingParams:
    """Everything but bad words. Raises APIError."""
    top_p = fields.number("top_p", 0.0, 1.0)
    if top_p == 0.0:
        raise invalid("`top_p` must be above 0.", "top_p")
    top_k = fields.integer("top_k", -1)
    temperature = fields.number("temperature", 0.0, 2.0)
    rules = _read_rules(fields, info, max_tokens, max_tokens_param)
    return SamplingParams(
        max_tokens=max_tokens if max_tokens is not None else info.max_model_len,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k is None or top_k == -1 else min(top_k, info.vocab_size),
        min_p=fields.number("min_p", 0.0, 1.0) or 0.0,
        seed=read_seed(fields),
        stop_token_ids=_read_ids(fields, "stop_token_ids", info, MAX_STOP_TOKEN_IDS),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=scores.drawn,
        prompt_logprobs=scores.prompt_in_engine,
        rules=None if rules == _NO_RULES else rules,
    )


def read_bad_words(fields: Fields) -> tuple[str, ...]:
    """`bad_words`, each once. Raises APIError."""
    words = fields.get("bad_words")
    if words is None:
        return ()
    if type(words) is list and len(words) > MAX_BAD_WORDS:
        raise invalid(f"`bad_words` may have at most {MAX_BAD_WORDS} words.", "bad_words")
    if type(words) is not list or any(type(word) is not str for word in words):
        raise wrong_type("bad_words", "a list of strings")
    if any(not word.strip() or len(word) > MAX_BAD_WORD_CHARS for word in words):
        message = f"Words in `bad_words` must have between 1 and {MAX_BAD_WORD_CHARS} characters, not all white space."
        raise invalid(message, "bad_words")
    return tuple(dict.fromkeys(words))


def _read_rules(fields: Fields, info: ServingInfo, max_tokens: int | None, max_tokens_param: str) -> LogitRules:
    min_tokens = fields.integer("min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        message = f"`min_tokens` must be at most `{max_tokens_param}`, which is {max_tokens}."
        raise invalid(message, "min_tokens")
    return LogitRules(
        presence_penalty=fields.number("presence_penalty", -MAX_PENALTY, MAX_PENALTY) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -MAX_PENALTY, MAX_PENALTY) or 0.0,
        repetition_penalty=_read_repetition_penalty(fields),
        bias=_read_bias(fields, info),
        allowed_token_ids=_read_allowed(fields, info),
        min_tokens=min_tokens,
    )


def _read_repetition_penalty(fields: Fields) -> float:
    value = fields.number("repetition_penalty", -math.inf, math.inf)
    if value is None:
        return 1.0
    if value <= 0:
        raise invalid("`repetition_penalty` must be above 0.", "repetition_penalty")
    return value


def _read_bias(fields: Fields, info: ServingInfo) -> dict[int, float]:
    values = fields.get("logit_bias")
    if values is None:
        return {}
    expected = "an object of token ids and numbers"
    if type(values) is dict and len(values) > MAX_BIASES:
        raise invalid(f"`logit_bias` may have at most {MAX_BIASES} entries.", "logit_bias")
    if type(values) is not dict or any(type(value) not in (int, float) for value in values.values()):
        raise wrong_type("logit_bias", expected)
    if not all(map(_TOKEN_ID.fullmatch, values)):
        raise wrong_type("logit_bias", expected)
    bias = {int(token_id): float(value) for token_id, value in values.items()}
    if any(token_id >= info.vocab_size for token_id in bias):
        raise invalid(f"Token ids in `logit_bias` must be at least 0 and below {info.vocab_size}.", "logit_bias")
    if any(abs(value) > MAX_BIAS for value in bias.values()):
        raise invalid(f"Values of `logit_bias` must be between {-MAX_BIAS:g} and {MAX_BIAS:g}.", "logit_bias")
    return bias


def _read_allowed(fields: Fields, info: ServingInfo) -> tuple[int, ...]:
    allowed = _read_ids(fields, "allowed_token_ids", info, info.vocab_size)
    if not allowed and fields.get("allowed_token_ids") is not None:
        raise invalid("`allowed_token_ids` must not be an empty list: it would allow nothing.", "allowed_token_ids")
    return allowed


def _read_ids(fields: Fields, name: str, info: ServingInfo, at_most: int) -> tuple[int, ...]:
    value: Any = fields.get(name)
    if value is None:
        return ()
    if type(value) is not list:
        raise wrong_type(name, "a list of integer token ids")
    if len(value) > at_most:
        raise invalid(f"`{name}` may have at most {at_most} entries.", name)
    return token_ids(value, name, info.vocab_size)
