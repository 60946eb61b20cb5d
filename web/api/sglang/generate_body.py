"""The body of `POST /generate`, SGLang's own endpoint, and the completion that it asks for.

A prompt is a `text` or `input_ids`, or a list of either, which makes the answer a list. Sampling fields are those of
`sampling_params`, where an unknown one is refused, as SGLang does. Defaults are the model's, but for `max_new_tokens`.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from quipu.actors.config.declarations import COMPLETIONS, Bounds

from ...request.errors import bad_value
from ..answer import ParsedRequest
from ..body_field import BOOLEAN, BodyField, Schema, shape
from ..body_shapes import IDS, JSON_SCHEMA
from ..body_table import MAX_LOGPROBS
from ..declared_body import Body
from ..fields import Fields, missing, wrong_type
from ..generation import Delivery, GenerationRequest
from ..openai.completions import read_completion
from ..translated_body import Translation, refuse_unknown, same_as, sampling_names

DEFAULT_MAX_NEW_TOKENS: Final = 128
_TEXTS: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
_TOKENS: Schema = {"anyOf": [IDS, {"type": "array", "items": IDS, "minItems": 1}]}
_TYPES: Final = {
    "text": "a string or a list of strings",
    "input_ids": "a list of token ids, or a list of lists of token ids",
}
"""Of the fields that have prompts, for messages."""
_SAMPLING: Final = {
    field.name: (completion, field)
    for completion, field in (
        ("max_tokens", same_as("max_tokens", "max_new_tokens", default=DEFAULT_MAX_NEW_TOKENS)),
        ("min_tokens", same_as("min_tokens", "min_new_tokens")),
        *((name, same_as(name)) for name in ("n", "stop", "skip_special_tokens")),
        ("include_stop_str_in_output", same_as("include_stop_str_in_output", "no_stop_trim")),
        *((name, same_as(name)) for name in sampling_names("allowed_token_ids", "bad_words", "min_tokens", "seed")),
        ("seed", same_as("seed", "sampling_seed")),
        ("guided_json", same_as("guided_json", "json_schema")),
        ("guided_regex", same_as("guided_regex", "regex")),
        ("guided_grammar", same_as("guided_grammar", "ebnf", help="A grammar in EBNF (GBNF), or llguidance's Lark.")),
        ("structured_outputs", BodyField(name="structural_tag", schema=JSON_SCHEMA)),
    )
}
"""What each sampling field is in a completion, and its declaration."""
SAMPLING_PARAMS: Final = shape(*(field for _, field in _SAMPLING.values()), name="SGLangSamplingParams")
REQUEST: Final = shape(
    BodyField(name="text", schema=_TEXTS, help="Or `input_ids`."),
    BodyField(name="input_ids", schema=_TOKENS, help="Or `text`."),
    BodyField(name="sampling_params", inner=SAMPLING_PARAMS),
    BodyField(name="return_logprob", type=BOOLEAN),
    BodyField(
        name="logprob_start_len",
        bounds=Bounds(minimum=-1),
        default=-1,
        help="The token of the prompt with which its logprobs begin; -1: it has none. Not with `stream`.",
    ),
    BodyField(name="top_logprobs_num", bounds=Bounds(minimum=0, maximum=MAX_LOGPROBS), default=0),
    BodyField(name="return_text_in_logprobs", type=BOOLEAN),
    BodyField(name="return_prompt_token_ids", type=BOOLEAN, help="Not with `stream`."),
    same_as("stream"),
    same_as("model"),
    same_as("cache_salt"),
    same_as("priority"),
    name="GenerateRequest",
)


@attrs.frozen
class Wishes:
    """What a client wants of the answer beyond that of a completion."""

    is_list: bool
    logprob_start: int | None
    """The first token of the prompt that has an entry among the logprobs. None: none has."""
    with_text: bool
    """Logprobs name tokens by their texts, too."""
    with_prompt_ids: bool


async def read_generate(parsed: ParsedRequest) -> tuple[GenerationRequest, Wishes]:
    """Check a body. Raises APIError."""
    fields = Fields(parsed.body, declared=REQUEST)
    sampling = fields.fields("sampling_params")
    refuse_unknown(sampling, SAMPLING_PARAMS.by_name)
    translation = Translation()
    prompt = _prompt_param(fields)
    translation.put("prompt", prompt, fields.get(prompt))
    for name, (completion, _) in _SAMPLING.items():
        value = sampling.get(name)
        if name == "structural_tag" and value is not None:
            translation.put(completion, sampling.path, {name: value})
        else:
            translation.put(completion, sampling.param(name), value)
    translation.put("max_tokens", sampling.param("max_new_tokens"), DEFAULT_MAX_NEW_TOKENS)
    for name in ("stream", "model", "cache_salt", "priority"):
        translation.put(name, name, fields.get(name))
    start = _put_logprobs(translation, fields)
    translation.put_others(sampling.values, SAMPLING_PARAMS.by_name, f"{sampling.path}.")
    translation.put_others(parsed.body, REQUEST.by_name)
    translation.put("return_token_ids", "return_prompt_token_ids", True)
    with translation.own_errors():
        wanted = await read_completion(
            translation.values, parsed.info, parsed.options.max_sequences, prompt_types=_TYPES[prompt]
        )
        stream = Body(translation.values, COMPLETIONS).flag("stream")
    with_prompt_ids = fields.flag("return_prompt_token_ids")
    if with_prompt_ids and stream:
        raise bad_value("return_prompt_token_ids", "not supported when `stream` is true")
    value = fields.get(prompt)
    is_list = type(value) is list and (prompt == "text" or type(value[0]) is list)
    wishes = Wishes(is_list or wanted.num_choices > 1, start, fields.flag("return_text_in_logprobs"), with_prompt_ids)
    return attrs.evolve(translation.renamed(wanted), delivery=Delivery(stream=stream)), wishes


def _prompt_param(fields: Fields) -> str:
    """Return the field that has the prompts, which are of its type as far as their first one shows."""
    text, ids = fields.get("text"), fields.get("input_ids")
    if text is None and ids is None:
        raise missing("text")
    if text is not None and ids is not None:
        raise bad_value("input_ids", "not allowed together with `text`")
    if ids is None:
        if type(text) is not str and not (type(text) is list and (not text or type(text[0]) is str)):
            raise wrong_type("text", _TYPES["text"])
        return "text"
    if type(ids) is not list or (ids and type(ids[0]) not in (int, list)):
        raise wrong_type("input_ids", _TYPES["input_ids"])
    return "input_ids"


def _put_logprobs(translation: Translation, fields: Fields) -> int | None:
    """Add which logprobs are wanted, and return where those of the prompt begin."""
    start: Any = fields.integer("logprob_start_len")
    num_top = fields.integer("top_logprobs_num") or 0
    if not fields.flag("return_logprob"):
        return None
    translation.put("logprobs", "top_logprobs_num", num_top)
    if start in (None, -1):
        return None
    translation.put("prompt_logprobs", "logprob_start_len", num_top)
    return int(start)
