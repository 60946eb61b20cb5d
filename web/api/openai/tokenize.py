"""Endpoints that show prompts as the tokenizer sees them, as vLLM has them.

    POST /tokenize                      {"prompt"} or {"messages"}: {"count", "max_model_len", "tokens", "token_strs"}
    POST /detokenize                    {"tokens"}: {"prompt"}
    POST /v1/chat/completions/render    a chat: its rendered text, its token ids, and how it would be sampled

A chat is read as `/v1/chat/completions` reads it. What must always hold: no account is opened and no engine used; the
tokens are those that a request with the same prompt has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from quart import Response
from quart_trio import QuartTrio

from quipu.actors.config.declarations import sampling_fields_of
from quipu.actors.messages.handler import PromptRead
from quipu.actors.messages.prompts import Prompt, TextPrompt, TokenPrompt
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.request_desk.interface import Desk, ServingInfo

from ...options import AppOptions
from ...request.errors import bad_value
from ...request.request_context import current_request_context
from ..bodies import take_body
from ..body_field import Shape
from ..body_table import SHAPES
from ..declared_body import Body
from ..fields import Fields, many_token_ids, missing, parse_object, wrong_type
from ..generation import GenerationRequest, read_model, visible_to
from ..ignored_fields import ignored_fields
from ..json_structure import MAX_CHAT_VALUES, MAX_VALUES
from ..operation import route
from ..pace import Pace
from ..request_reader import read_delivery
from ..whole_response import whole_response
from .chat import read_chat
from .chunks import id_pieces
from .routes import CHAT
from .tokenize_schemas import CHAT_TO_COUNT, DETOKENIZE, IDS, MAX_TOKENS, RENDER, TEXT, TOKENIZE

_NAMES_AT_ONCE, _TEXT_AT_ONCE = 2048, 1 << 16


def install_tokenize(app: QuartTrio, desk: Desk, options: AppOptions) -> None:
    """Register the endpoints."""

    @route(app, "POST /tokenize", TOKENIZE)
    async def tokenize() -> Response:
        body, info = await _take(MAX_CHAT_VALUES), _info(desk)
        with_names = Fields(body).flag("return_token_strs")
        if body.get("messages") is None:
            prompt, special = await _read_text(body, info)
            read = await desk.read_prompt(prompt, "prompt", _tenant(), special=special, with_names=with_names)
        elif body.get("prompt") is not None:
            raise bad_value("prompt", "not allowed together with `messages`")
        else:
            chat = await _read_chat(body, info, options, CHAT_TO_COUNT)
            read = await desk.read_prompt(
                chat.prompts[0], "messages", _tenant(), with_names=with_names, truncation=chat.truncation
            )
        return await whole_response(_tokens(read, info.max_model_len, with_names=with_names))

    @route(app, "POST /detokenize", DETOKENIZE)
    async def detokenize() -> Response:
        body, info = await _take(MAX_VALUES), _info(desk)
        prompt = await _read_ids(body, info)
        read = await desk.read_prompt(prompt, "tokens", _tenant(), with_text=True)
        return await whole_response(_object({"prompt": read.text}))

    @route(app, f"POST {CHAT.endpoint}/render", RENDER)
    async def render() -> Response:
        body, info = await _take(MAX_CHAT_VALUES), _info(desk)
        chat = await _read_chat(body, info, options, SHAPES[CHAT.endpoint])
        stream = read_delivery(Body(body, CHAT.endpoint)).stream
        read = await desk.read_prompt(
            chat.prompts[0], "messages", _tenant(), with_text=True, truncation=chat.truncation
        )
        return await whole_response(_rendered(chat, read, stream=stream))


def _info(desk: Desk) -> ServingInfo:
    return visible_to(current_request_context().principal, desk.info)


def _tenant() -> str:
    return current_request_context().principal.tenant


async def _take(max_values: int) -> dict[str, Any]:
    data, share = await take_body()
    return await parse_object(data, share.grow, max_values)


async def _note_ignored(body: dict[str, Any], declared: Shape, unused: Sequence[str] = ()) -> None:
    current_request_context().ignored_fields = (await ignored_fields(body, declared, unused)).header


async def _read_text(body: dict[str, Any], info: ServingInfo) -> tuple[Prompt, bool]:
    """Return the text, and whether the tokenizer may add its own tokens. Raises APIError."""
    fields = Fields(body, declared=TEXT)
    read_model(fields, info)
    await _note_ignored(body, TEXT)
    return TextPrompt(fields.text("prompt")), fields.flag("add_special_tokens")


async def _read_ids(body: dict[str, Any], info: ServingInfo) -> Prompt:
    fields = Fields(body, declared=IDS)
    read_model(fields, info)
    await _note_ignored(body, IDS)
    ids = fields.get("tokens")
    if ids is None:
        raise missing("tokens")
    if type(ids) is not list:
        raise wrong_type("tokens", "a list of integer token ids")
    if len(ids) > MAX_TOKENS:
        raise bad_value("tokens", f"must have at most {MAX_TOKENS} token ids")
    async with Pace() as pace:
        return TokenPrompt(await many_token_ids(ids, "tokens", info.vocab_size, pace))


async def _read_chat(
    body: dict[str, Any], info: ServingInfo, options: AppOptions, declared: Shape
) -> GenerationRequest:
    chat = await read_chat(body, info, options.max_sequences)
    await _note_ignored(body, declared, chat.unused_fields)
    return chat


def _tokens(read: PromptRead, max_model_len: int, *, with_names: bool) -> Iterator[bytes]:
    yield b'{"count":%d,"max_model_len":%d,"tokens":' % (len(read.token_ids), max_model_len)
    yield from id_pieces(read.token_ids)
    yield b',"token_strs":'
    if not with_names:
        yield b"null}"
        return
    yield b"["
    for start in range(0, len(read.names), _NAMES_AT_ONCE):
        yield (b"," if start else b"") + orjson.dumps(read.names[start : start + _NAMES_AT_ONCE])[1:-1]
    yield b"]}"


def _rendered(chat: GenerationRequest, read: PromptRead, *, stream: bool) -> Iterator[bytes]:
    """Yield what vLLM's endpoint says that applies here, and the text."""
    sampling = {field.name: getattr(chat.sampling, field.name) for field in sampling_fields_of(SamplingParams)}
    described = {
        "request_id": current_request_context().request_id,
        "model": chat.model,
        "sampling_params": {
            **sampling,
            "n": chat.num_choices,
            "max_tokens": chat.max_tokens,
            "stop": chat.stop,
            "bad_words": chat.bad_words,
        },
        "stream": stream,
        "cache_salt": chat.cache_salt or None,
        "priority": chat.priority,
    }
    yield orjson.dumps(described)[:-1] + b',"token_ids":'
    yield from id_pieces(read.token_ids)
    yield b","
    head, *rest = _object({"prompt": read.text})
    yield head[1:]
    yield from rest


def _object(texts: dict[str, str]) -> Iterator[bytes]:
    """Yield an object with a long text, in pieces that take about a millisecond each to make."""
    ((name, text),) = texts.items()
    yield b"{" + orjson.dumps(name) + b':"'
    for start in range(0, len(text), _TEXT_AT_ONCE):
        yield orjson.dumps(text[start : start + _TEXT_AT_ONCE])[1:-1]
    yield b'"}'
