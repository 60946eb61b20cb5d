"""The bodies of `POST /completion` and `/infill`, llama.cpp's own endpoints, and the completions that they ask for.

A prompt is a text, a list of token ids, or a list of both, whose texts are encoded as `/tokenize` does it. A list of
texts is several prompts, and so is one with a list in it. Defaults are the model's; without `n_predict` there is no
limit but the context. A body of `/infill` has the two texts around a gap in place of a prompt. Where some fields are
absent, those with OpenAI's names hold, as in llama.cpp (`params_from_json_cmpl`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import attrs

from quipu.actors.config.declarations import COMPLETIONS, Bounds
from quipu.actors.messages.prompts import InfillPrompt

from ...request.errors import bad_value
from ..answer import ParsedRequest
from ..body_field import STRING, BodyField, Schema, Shape, shape
from ..body_shapes import IDS
from ..body_table import MAX_LOGPROBS
from ..declared_body import Body
from ..fields import Fields, missing, whole_number, wrong_type
from ..generation import Delivery, GenerationRequest, read_model
from ..openai.completions import read_completion
from ..pace import Pace
from ..translated_body import BIASES, Translation, same_as, sampling_names

UNLIMITED: Final = -1
"""As `n_predict`; as `seed`: a random one."""
MAX_BIASES: Final = 1024
_ITEMS_A_SLICE, _TICKS_A_SLICE = 8192, 64
"""Items of a list that are looked at in one piece, and what that costs beside parts of messages."""
_NEVER: Final = -100.0
"""The bias of a token that must not appear."""
_PIECE: Schema = {"type": ["string", "integer"]}
_PROMPT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PIECE, "minItems": 1}]}
_PROMPTS: Schema = {"anyOf": [_PROMPT, {"type": "array", "items": {"anyOf": [_PROMPT, IDS]}, "minItems": 1}]}
_PROMPT_TYPES: Final = "a string, a list of strings and token ids, or a list of such lists"
_PAIR: Schema = {"type": "array", "prefixItems": [{"type": ["integer", "number"]}, {"type": ["number", "boolean"]}]}
_BIASES: Final = same_as(BIASES)
SAMPLING: Final = {
    field.name: (completion, field)
    for completion, field in (
        ("n", same_as("n", "n_cmpl")),
        *((name, same_as(name)) for name in ("stop", "grammar")),
        *(
            (name, same_as(name))
            for name in sampling_names(
                "allowed_token_ids", "bad_words", "min_tokens", "repetition_penalty", "stop_token_ids", BIASES
            )
        ),
        ("repetition_penalty", same_as("repetition_penalty", "repeat_penalty")),
        ("guided_json", same_as("guided_json", "json_schema")),
    )
}
"""What each field is in a completion, and its declaration."""
_LIMIT = BodyField(
    name="n_predict",
    bounds=Bounds(minimum=UNLIMITED),
    default=UNLIMITED,
    help="The most tokens to generate; -1: what the context has room for.",
)
_PROBS = BodyField(
    name="n_probs",
    bounds=Bounds(minimum=0, maximum=MAX_LOGPROBS),
    default=0,
    help="Top logprobs for each token; 0: no logprobs.",
)
_LIMITS: Final = ("n_predict", "max_completion_tokens", "max_tokens")
"""Names of one field, the one that holds first."""


def _also(field: BodyField, name: str) -> BodyField:
    """Declare another name of a field."""
    return attrs.evolve(field, name=name, default=None, help=f"As `{field.name}`, if that is absent.")


_OTHERS: Final = (
    _LIMIT,
    *(_also(_LIMIT, name) for name in _LIMITS[1:]),
    *(field for _, field in SAMPLING.values()),
    _also(SAMPLING["n_cmpl"][1], "n"),
    BodyField(
        name=BIASES,
        schema={"anyOf": [_BIASES.schema, {"type": "array", "items": _PAIR, "maxItems": MAX_BIASES}]},
        help="By token id, or pairs of a token id and a number, or false for never.",
    ),
    _PROBS,
    attrs.evolve(_also(_PROBS, "logprobs"), help="As `n_probs`, if that is absent or 0."),
    same_as("return_token_ids", "return_tokens"),
    same_as("stream"),
    same_as("model"),
    same_as("cache_salt"),
    same_as("priority"),
)
REQUEST: Final = shape(
    BodyField(name="prompt", schema=_PROMPTS, is_required=True), *_OTHERS, name="LlamaCompletionRequest"
)
INFILL_REQUEST: Final = shape(
    BodyField(name="input_prefix", type=STRING, is_required=True, help="The text before the gap."),
    BodyField(name="input_suffix", type=STRING, is_required=True, help="What stands after it."),
    BodyField(name="prompt", type=STRING, help="The end of the text before the gap."),
    *_OTHERS,
    name="LlamaInfillRequest",
)
Encode = Callable[[str, bool], Awaitable[list[int]]]
"""Encodes a text that stands beside token ids. The flag: whether the tokenizer may add its own."""


@attrs.frozen
class LlamaRequest:
    declared: Shape
    wanted: GenerationRequest
    shows_tokens: bool
    """A whole answer has the ids of its tokens."""


async def read_llama(parsed: ParsedRequest, encode: Encode) -> LlamaRequest:
    """Check a body of `/completion`. Raises APIError."""
    fields = Fields(parsed.body, declared=REQUEST)
    read_model(fields, parsed.info)
    async with Pace() as pace:
        joiner = _Joiner(parsed.options.max_sequences, parsed.info.max_model_len, encode, pace)
        prompts = await joiner.prompts(fields.get("prompt"))
    return await _read(parsed, REQUEST, "prompt", prompts)


async def read_infill(parsed: ParsedRequest) -> LlamaRequest:
    """Check a body of `/infill`. Raises APIError."""
    fields = Fields(parsed.body, declared=INFILL_REQUEST)
    read_model(fields, parsed.info)
    before, after = fields.text("input_prefix"), fields.text("input_suffix")
    before += fields.optional_text("prompt") or ""
    request = await _read(parsed, INFILL_REQUEST, "input_prefix", before)
    prompt = InfillPrompt(before, after, "input_suffix")
    return attrs.evolve(request, wanted=attrs.evolve(request.wanted, prompts=(prompt,)))


async def _read(parsed: ParsedRequest, declared: Shape, prompt_param: str, prompts: Any) -> LlamaRequest:
    """Check everything but the prompts, which are those of a completion. Raises APIError."""
    fields, translation = Fields(parsed.body, declared=declared), Translation()
    translation.put("prompt", prompt_param, prompts)
    for name, (completion, _) in SAMPLING.items():
        if (name, whole_number(value := fields.get(name))) != ("seed", UNLIMITED):
            translation.put(completion, name, value)
    fields.integer("n")
    translation.put("n", "n", fields.get("n"))
    limits = [(name, limit) for name in _LIMITS if (limit := fields.integer(name)) is not None]
    for name, limit in limits[:1]:
        translation.put("max_tokens", name, None if limit == UNLIMITED else limit)
    for name in ("n_probs", "logprobs"):
        translation.put("logprobs", name, fields.integer(name) or None)
    translation.put(BIASES, BIASES, _biases(fields.get(BIASES)))
    for name in ("stream", "model", "cache_salt", "priority"):
        translation.put(name, name, fields.get(name))
    shows_tokens = fields.flag("return_tokens")
    translation.put("return_token_ids", "return_tokens", True)
    translation.put_others(parsed.body, declared.by_name)
    with translation.own_errors():
        wanted = await read_completion(
            translation.values, parsed.info, parsed.options.max_sequences, None, _PROMPT_TYPES
        )
        stream = Body(translation.values, COMPLETIONS).flag("stream")
    wanted = attrs.evolve(translation.renamed(wanted), delivery=Delivery(stream=stream))
    return LlamaRequest(declared, wanted, shows_tokens)


@attrs.define
class _Joiner:
    """Makes token ids of prompts that have both texts and ids. Its methods raise APIError."""

    max_texts: int
    max_model_len: int
    encode: Encode
    pace: Pace
    num_texts: int = 0

    async def prompts(self, value: Any) -> Any:
        """Return a prompt or prompts as completions have them: all texts or all ids."""
        if value is None:
            raise missing("prompt")
        if type(value) is not list:
            return value
        kinds = await self._kinds(value)
        if kinds == {int, str}:
            return await self._joined(value)
        if list not in kinds or kinds - {str, list} or len(value) > self.max_texts:
            return value
        return [await self._joined(one if type(one) is list else [one]) for one in value]

    async def _kinds(self, value: list[Any]) -> set[type]:
        kinds: set[type] = set()
        for start in range(0, len(value), _ITEMS_A_SLICE):
            kinds |= set(map(type, value[start : start + _ITEMS_A_SLICE]))
            await self.pace.tick(_TICKS_A_SLICE)
        return kinds

    async def _joined(self, pieces: list[Any]) -> list[Any]:
        """Return the ids of texts and ids, in order."""
        ids: list[Any] = []
        for start in range(0, len(pieces), _ITEMS_A_SLICE):
            part = pieces[start : start + _ITEMS_A_SLICE]
            if str not in set(map(type, part)):
                ids += part
            else:
                for at, piece in enumerate(part, start):
                    ids += await self._ids(piece, at) if type(piece) is str else [piece]
                    self._check(len(ids))
            self._check(len(ids))
            await self.pace.tick(_TICKS_A_SLICE)
        return ids

    async def _ids(self, text: str, at: int) -> list[int]:
        self.num_texts += 1
        if self.num_texts > self.max_texts:
            raise bad_value("prompt", f"must have at most {self.max_texts} texts")
        self.pace.rest()
        return await self.encode(text, at == 0)

    def _check(self, num_tokens: int) -> None:
        if num_tokens > self.max_model_len:
            problem = f"has more than {self.max_model_len} tokens, the context length"
            raise bad_value("prompt", problem, "context_length_exceeded")


def _biases(value: Any) -> Any:
    """Return biases as an object. Raises APIError."""
    if type(value) is not list:
        return value
    if len(value) > MAX_BIASES:
        raise bad_value(BIASES, f"must have at most {MAX_BIASES} entries")
    biases: dict[str, Any] = {}
    for pair in value:
        token_id = whole_number(pair[0]) if type(pair) is list and len(pair) == 2 else None
        if type(token_id) is not int or type(pair[1]) not in (int, float, bool) or pair[1] is True:
            raise wrong_type(BIASES, "an object, or pairs of a token id and a number or false")
        biases[str(token_id)] = _NEVER if pair[1] is False else pair[1]
    return biases
