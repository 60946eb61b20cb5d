"""How tokens are drawn: reads the sampling fields of every API as they are declared in `actors/messages/sampling.py`.

Used by the readers of request bodies. What is read here is checked completely: nothing below the web layer looks at it
again, and a value that an executor could not take would fail the step of all its neighbours. Bad words are only
counted here; the tokenizer turns them into tokens.

What must always hold: no field is named here; one that an endpoint does not take is refused, never ignored.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from quipu.actors.declarations import SamplingField, sampling_fields_of
from quipu.actors.messages.sampling import SAMPLING_FIELDS, LogitRules, SamplingParams
from quipu.actors.request_desk.interface import ServingInfo

from ..request.errors import APIError, invalid
from .fields import Fields, token_ids, wrong_type
from .generation import NO_SCORES, WantedScores

SAMPLING_NAMES = frozenset(field.name for field in SAMPLING_FIELDS)
"""What every endpoint reads or refuses."""
MAX_WORD_CHARS = 256
_WORDS = "words"
"""The reader of what the tokenizer takes instead of the engine."""
_PARAMS = sampling_fields_of(SamplingParams)
_RULES = tuple(field for field in sampling_fields_of(LogitRules) if field.reader != _WORDS)
_WORD_FIELDS = tuple(field for field in SAMPLING_FIELDS if field.reader == _WORDS)
_NO_RULES = LogitRules()
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_SEED_SPACE = 2**64
_RANDOM_SEED_BITS = 53
"""Of a seed that nobody asked for: what every reader of JSON gets whole (JavaScript and jq round longer numbers), for
it is there to be sent again."""


@attrs.frozen
class _Request:
    """What a value may have to be compared with."""

    endpoint: str
    info: ServingInfo
    max_tokens: int | None
    max_tokens_param: str


def read_sampling(
    fields: Fields,
    info: ServingInfo,
    *,
    endpoint: str,
    max_tokens: int | None,
    max_tokens_param: str,
    scores: WantedScores = NO_SCORES,
) -> SamplingParams:
    """Read everything but bad words. Raises APIError."""
    request = _Request(endpoint, info, max_tokens, max_tokens_param)
    given = _read(fields, _PARAMS, request)
    rules = LogitRules(**given_rules) if (given_rules := _read(fields, _RULES, request)) else _NO_RULES
    return SamplingParams(
        max_tokens=max_tokens if max_tokens is not None else info.max_model_len,
        logprobs=scores.drawn,
        prompt_logprobs=scores.prompt_in_engine,
        rules=None if rules == _NO_RULES else rules,
        **given,
    )


def read_bad_words(fields: Fields, info: ServingInfo, *, endpoint: str) -> tuple[str, ...]:
    """Read the words that no output may hold, each once. Raises APIError."""
    given = _read(fields, _WORD_FIELDS, _Request(endpoint, info, None, ""))
    return tuple(dict.fromkeys(word for words in given.values() for word in words))


def _read(fields: Fields, declared: Sequence[SamplingField], request: _Request) -> dict[str, Any]:
    """Return the values of the fields that are present, by their names in the message to the engine."""
    values: dict[str, Any] = {}
    for field in declared:
        value = fields.get(field.name)
        if value is None:
            if field.reader == "seed":
                values[field.attribute] = secrets.randbits(_RANDOM_SEED_BITS)
        elif request.endpoint in field.apis:
            values[field.attribute] = _READERS[field.reader](field, value, request)
        elif value not in field.off:
            raise invalid(f"`{field.name}` is not a field of this endpoint.", field.name, "unknown_parameter")
    return values


def _bad_value(field: SamplingField, problem: str) -> APIError:
    return invalid(f"Invalid value for `{field.name}`: {problem}.", field.name)


def _check_bounds(field: SamplingField, value: float, request: _Request) -> None:
    bounds = field.bounds_for(request.endpoint)
    if not bounds.allow(value):
        raise _bad_value(field, f"must be {bounds.words()}")


def _read_number(field: SamplingField, value: Any, request: _Request) -> float:
    if type(value) is not int and type(value) is not float:
        raise wrong_type(field.name, "a number")
    _check_bounds(field, value, request)
    return float(value)


def _read_integer(field: SamplingField, value: Any, request: _Request) -> int:
    if type(value) is not int:
        # Integers beyond 64 bits arrive here as floats.
        raise wrong_type(field.name, "an integer of at most 64 bits")
    _check_bounds(field, value, request)
    if field.at_most_max_tokens and request.max_tokens is not None and value > request.max_tokens:
        raise _bad_value(field, f"must be at most `{request.max_tokens_param}`, which is {request.max_tokens}")
    if value == field.same_as_off:
        return int(field.off[0])
    return min(value, request.info.vocab_size) if field.is_clamped else value


def _read_boolean(field: SamplingField, value: Any, request: _Request) -> bool:
    if type(value) is not bool:
        raise wrong_type(field.name, "a boolean")
    return value


def _read_seed(field: SamplingField, value: Any, request: _Request) -> int:
    # A negative seed is the same 64 bits read as unsigned.
    return _read_integer(field, value, request) % _SEED_SPACE


def _read_token_ids(field: SamplingField, value: Any, request: _Request) -> tuple[int, ...]:
    if type(value) is not list:
        raise wrong_type(field.name, "a list of integer token ids")
    max_length = request.info.vocab_size if field.max_length is None else field.max_length
    if len(value) > max_length:
        raise _bad_value(field, f"may have at most {max_length} entries")
    return token_ids(value, field.name, request.info.vocab_size)


def _read_some_token_ids(field: SamplingField, value: Any, request: _Request) -> tuple[int, ...]:
    if value == []:
        raise _bad_value(field, "must not be an empty list, which would allow no token")
    return _read_token_ids(field, value, request)


def _read_logit_bias(field: SamplingField, value: Any, request: _Request) -> dict[int, float]:
    expected = "an object of token ids and numbers"
    if type(value) is dict and field.max_length is not None and len(value) > field.max_length:
        raise _bad_value(field, f"may have at most {field.max_length} entries")
    if type(value) is not dict or any(type(bias) not in (int, float) for bias in value.values()):
        raise wrong_type(field.name, expected)
    if not all(map(_TOKEN_ID.fullmatch, value)):
        raise wrong_type(field.name, expected)
    biases = {int(token_id): float(bias) for token_id, bias in value.items()}
    if any(token_id >= request.info.vocab_size for token_id in biases):
        raise _bad_value(field, f"token ids must be at least 0 and below {request.info.vocab_size}")
    if not all(map(field.bounds.allow, biases.values())):
        raise _bad_value(field, f"values must be {field.bounds.words()}")
    return biases


def _read_words(field: SamplingField, value: Any, request: _Request) -> tuple[str, ...]:
    if type(value) is list and field.max_length is not None and len(value) > field.max_length:
        raise _bad_value(field, f"may have at most {field.max_length} words")
    if type(value) is not list or any(type(word) is not str for word in value):
        raise wrong_type(field.name, "a list of strings")
    if any(not word.strip() or len(word) > MAX_WORD_CHARS for word in value):
        raise _bad_value(field, f"words must have between 1 and {MAX_WORD_CHARS} characters, not all white space")
    return tuple(value)


_READERS: Mapping[str, Callable[[SamplingField, Any, _Request], Any]] = {
    "boolean": _read_boolean,
    "integer": _read_integer,
    "logit_bias": _read_logit_bias,
    "number": _read_number,
    "seed": _read_seed,
    "some_token_ids": _read_some_token_ids,
    "token_ids": _read_token_ids,
    _WORDS: _read_words,
}
