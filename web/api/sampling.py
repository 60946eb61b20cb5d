"""How tokens are drawn: reads the sampling fields of every API as they are declared in `actors/messages/sampling.py`.

Values are checked completely: nothing below the web layer looks at them again, and a value that an executor could not
take would fail the step of all its neighbours. Bad words are only counted here; the tokenizer turns them into tokens.

What must always hold: no field is named here; one that an endpoint does not take is refused, never ignored.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from quipu.actors.config.declarations import COMPACT, EVERY_API, SamplingField, sampling_fields_of
from quipu.actors.messages.sampling import SAMPLING_FIELDS, LogitRules, SamplingParams
from quipu.actors.request_desk.interface import ServingInfo

from ..request.errors import bad_value, unknown_parameter
from .declared_body import Body
from .fields import check_ids, read_boolean, read_integer, read_number, wrong_type
from .generation import TokenLimit, WantedScores

_FROM_CHECKPOINT: Mapping[type[attrs.AttrsInstance], Mapping[str, str]] = {
    message: {field.name: field.attribute for field in sampling_fields_of(message) if field.from_checkpoint}
    for message in (SamplingParams, LogitRules)
}
MAX_WORD_CHARS = 256
_NO_RULES = LogitRules()
TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_SEED_SPACE = 2**64
_RANDOM_SEED_BITS = 53
"""Of a seed that the client did not choose and may want to send again: JavaScript and jq round longer integers."""


@attrs.frozen
class Sampling:
    params: SamplingParams
    bad_words: tuple[str, ...]
    """Each once. The tokenizer puts them into the rules of `params`."""


@attrs.frozen
class _Context:
    info: ServingInfo
    limit: TokenLimit


def read_sampling(body: Body, info: ServingInfo, limit: TokenLimit, scores: WantedScores) -> Sampling:
    """Read every sampling field of a body. Raises APIError, also for those that its endpoint does not take."""
    context = _Context(info, limit)
    refuse_sampling(body)
    given = _suggested(info, SamplingParams) | _read(body, _PARAMS[body.endpoint], context)
    rules = _suggested(info, LogitRules) | _read(body, _RULES[body.endpoint], context)
    bad_words: tuple[str, ...] = rules.pop(_WORDS.attribute, ())
    changed = LogitRules(**rules) if rules else _NO_RULES
    params = SamplingParams(
        max_tokens=limit.num_tokens if limit.num_tokens is not None else info.max_model_len,
        logprobs=scores.output,
        prompt_logprobs=scores.prompt_in_engine,
        rules=None if changed == _NO_RULES else changed,
        **given,
    )
    return Sampling(params, tuple(dict.fromkeys(bad_words)))


def _suggested(info: ServingInfo, message: type[attrs.AttrsInstance]) -> dict[str, Any]:
    """Return the checkpoint's defaults for the fields of a message; they hold on every endpoint."""
    attributes = _FROM_CHECKPOINT[message]
    return {attributes[name]: value for name, value in info.sampling_defaults.items() if name in attributes}


_Reader = Callable[[SamplingField, Any, _Context], Any]
_Readers = Sequence[tuple[SamplingField, _Reader]]


def _read(body: Body, readers: _Readers, context: _Context) -> dict[str, Any]:
    """Return the values of the fields that are present, by their names in the message to the engine."""
    values: dict[str, Any] = {}
    for field, read in readers:
        value = body.get(field.name)
        if value is not None:
            values[field.attribute] = read(field, value, context)
        elif field.reader == "seed":
            values[field.attribute] = secrets.randbits(_RANDOM_SEED_BITS)
    return values


def _read_integer(field: SamplingField, value: Any, context: _Context) -> int:
    number = read_integer(value, field.name, field.bounds)
    limit = context.limit
    if field.at_most_max_tokens and limit.num_tokens is not None and number > limit.num_tokens:
        raise bad_value(field.name, f"must be at most `{limit.param}`, which is {limit.num_tokens}")
    if number == field.same_as_off:
        return int(field.default)
    return min(number, context.info.vocab_size) if field.is_clamped else number


def _read_seed(field: SamplingField, value: Any, context: _Context) -> int:
    # A negative seed is the same 64 bits read as unsigned.
    return _read_integer(field, value, context) % _SEED_SPACE


def _read_token_ids(field: SamplingField, value: Any, context: _Context) -> tuple[int, ...]:
    if type(value) is not list:
        raise wrong_type(field.name, "a list of integer token ids")
    max_length = context.info.vocab_size if field.max_length is None else field.max_length
    if len(value) > max_length:
        raise bad_value(field.name, f"must have at most {max_length} entries")
    check_ids(value, field.name, context.info.vocab_size)
    return tuple(value)


def _read_some_token_ids(field: SamplingField, value: Any, context: _Context) -> tuple[int, ...]:
    if value == []:
        raise bad_value(field.name, "must not be an empty list, which would allow no token")
    return _read_token_ids(field, value, context)


def _read_biases(field: SamplingField, value: Any, context: _Context) -> dict[int, float]:
    if type(value) is dict and field.max_length is not None and len(value) > field.max_length:
        raise bad_value(field.name, f"must have at most {field.max_length} entries")
    if (
        type(value) is not dict
        or any(type(bias) not in (int, float) for bias in value.values())
        or not all(map(TOKEN_ID.fullmatch, value))
    ):
        raise wrong_type(field.name, "an object of token ids and numbers")
    biases = {int(token_id): float(bias) for token_id, bias in value.items()}
    if any(token_id >= context.info.vocab_size for token_id in biases):
        raise bad_value(field.name, f"token ids must be at least 0 and below {context.info.vocab_size}")
    if not all(map(field.bounds.allow, biases.values())):
        raise bad_value(field.name, f"values must be {field.bounds.words()}")
    return biases


def _read_words(field: SamplingField, value: Any, context: _Context) -> tuple[str, ...]:
    if type(value) is list and field.max_length is not None and len(value) > field.max_length:
        raise bad_value(field.name, f"must have at most {field.max_length} words")
    if type(value) is not list or any(type(word) is not str for word in value):
        raise wrong_type(field.name, "a list of strings")
    if any(not word.strip() or len(word) > MAX_WORD_CHARS for word in value):
        raise bad_value(field.name, f"words must have between 1 and {MAX_WORD_CHARS} characters, not all white space")
    return tuple(value)


_READERS: Mapping[str, _Reader] = {
    "boolean": lambda field, value, context: read_boolean(value, field.name),
    "integer": _read_integer,
    "biases": _read_biases,
    "number": lambda field, value, context: read_number(value, field.name, field.bounds),
    "seed": _read_seed,
    "some_token_ids": _read_some_token_ids,
    "token_ids": _read_token_ids,
    "words": _read_words,
}


def refuse_sampling(body: Body) -> None:
    """Raise APIError for the first sampling field that a body's endpoint does not take."""
    for field in _REFUSED[body.endpoint]:
        value = body.get(field.name)
        if value is not None and value not in field.off:
            raise unknown_parameter(field.name)


def _readers_of(message: type[attrs.AttrsInstance]) -> Mapping[str, _Readers]:
    """Return how each endpoint reads the fields that a message declares."""
    fields = sampling_fields_of(message)
    return {
        endpoint: [(field.on(endpoint), _READERS[field.reader]) for field in fields if endpoint in field.apis]
        for endpoint in EVERY_API
    }


_PARAMS = _readers_of(SamplingParams)
_RULES = _readers_of(LogitRules)
_REFUSED = {
    endpoint: [field for field in SAMPLING_FIELDS if endpoint not in field.apis] for endpoint in (*EVERY_API, COMPACT)
}
_WORDS = next(field for field in SAMPLING_FIELDS if field.reader == "words")
