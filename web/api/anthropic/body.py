"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`.

Other fields are ignored, as Anthropic's API ignores those of betas, and reported to the client
(`web/api/ignored_fields.py`). Fields that would change the response and are not implemented are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import attrs

from quipu.actors.request_desk.interface import ServingInfo

from ...options import AppOptions
from ...request.errors import APIError, bad_value, unknown_parameter, unsupported_parameter
from ..affinity import read_affinity_key
from ..fields import Fields, missing, wrong_type
from ..foreign_fields import refuse_foreign
from ..generation import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    GenerationRequest,
    read_cache_salt,
    read_model,
    read_priority,
)
from ..sampling import read_sampling
from .prompt import AskedPrompt, read_prompt

ENDPOINT = "/v1/messages"
UNSUPPORTED = ("container", "mcp_servers")
"""Refused unless empty."""
OTHER_ENDPOINTS_FIELDS: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": ({},),
    "background": (False,),
    "best_of": (1,),
    "chat_template": ("",),
    "continue_final_message": (False,),
    "conversation": (),
    "documents": ([],),
    "echo": (False,),
    "enable_thinking": (),
    "function_call": ("auto",),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": ("",),
    "guided_regex": ("",),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "instructions": ("",),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "modalities": ([], ["text"]),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "prediction": ({},),
    "previous_response_id": (),
    "prompt_cache_options": ({},),
    "prompt_logprobs": (False,),
    "reasoning": ({},),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stop": ([],),
    "structured_outputs": ({},),
    "suffix": ("",),
    "text": ({},),
    "thinking_token_budget": (-1,),
    "top_logprobs": (False, 0),
    "truncation": ("disabled",),
    "web_search_options": (),
}
"""Fields of other endpoints that would change the response, and their neutral values. Sampling fields are not listed:
their declarations name the endpoints that accept them; nor are those of other servers (`../foreign_table.py`)."""


@attrs.frozen
class MessagesRequest:
    wanted: GenerationRequest
    stream: bool


async def read_messages_request(body: dict[str, Any], info: ServingInfo, options: AppOptions) -> MessagesRequest:
    """Check a body. Raises APIError."""
    fields = Fields(body)
    model = read_model(fields, info)
    _refuse_thread(fields)
    prompt = await _read_counted(fields, info, options)
    if fields.get("max_tokens") is None:
        raise missing("max_tokens")
    max_tokens = fields.integer("max_tokens", 0)
    _refuse_unknown(fields)
    affinity_key = read_affinity_key(fields.fields("metadata"), "user_id")
    sampling = read_sampling(fields, info, endpoint=ENDPOINT, max_tokens=max_tokens, max_tokens_param="max_tokens")
    wanted = GenerationRequest(
        model=model,
        prompts=(prompt.chat,),
        prompt_param="messages",
        num_choices=1,
        max_tokens=max_tokens,
        max_tokens_param="max_tokens",
        sampling=sampling.params,
        stop=_read_stop(fields),
        include_stop=False,
        skip_special_tokens=True,
        priority=read_priority(fields),
        cache_salt=read_cache_salt(fields),
        affinity_key=affinity_key,
        bad_words=sampling.bad_words,
        system_param="system",
        output=prompt.output,
        grammar=prompt.grammar,
        thinking_budget=prompt.thinking_budget,
        unused_fields=prompt.unused_fields,
    )
    if max_tokens == 0:
        wanted = wanted.prewarmed("max_tokens")
    return MessagesRequest(wanted, fields.flag("stream"))


async def read_count(body: dict[str, Any], info: ServingInfo, options: AppOptions) -> AskedPrompt:
    """Check a body whose tokens are only to be counted. Raises APIError."""
    fields = Fields(body)
    read_model(fields, info)
    return await _read_counted(fields, info, options)


async def _read_counted(fields: Fields, info: ServingInfo, options: AppOptions) -> AskedPrompt:
    refuse_foreign(fields.values, with_hints=False)
    for name in UNSUPPORTED:
        if fields.get(name):
            raise unsupported_parameter(name)
    return await read_prompt(fields, info.output, keep_billing_header=options.keep_billing_header)


def _refuse_thread(fields: Fields) -> None:
    """Raise APIError for a conversation that the server should hold; clients then send the whole of it each time."""
    if fields.get("thread") is not None:
        message = "`thread` is not supported by this server: send the full conversation without it."
        details = {"error_code": "thread_unsupported_request"}
        raise APIError(HTTPStatus.BAD_REQUEST, message, "invalid_request_error", param="thread", details=details)


def _refuse_unknown(fields: Fields) -> None:
    for name, neutral in OTHER_ENDPOINTS_FIELDS.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            raise unknown_parameter(name)


def _read_stop(fields: Fields) -> tuple[str, ...]:
    stops: Any = fields.get("stop_sequences")
    if stops is None:
        return ()
    if type(stops) is list and len(stops) > MAX_STOP_STRINGS:
        raise bad_value("stop_sequences", f"must have at most {MAX_STOP_STRINGS} strings")
    if type(stops) is not list or any(type(stop) is not str for stop in stops):
        raise wrong_type("stop_sequences", "a list of strings")
    for index, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise bad_value(f"stop_sequences.{index}", f"must have between 1 and {MAX_STOP_CHARS} characters")
    return tuple(stops)
