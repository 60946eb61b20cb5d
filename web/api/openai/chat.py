"""`POST /v1/chat/completions`: its body. `chat_response.py` has its response.

Messages hold text: a string, or a list of text parts, which are joined. They are passed on to the checkpoint's chat
template unchanged; how a role is rendered is up to the template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quipu.actors.messages.prompts import ChatPrompt
from quipu.actors.request_desk.interface import ServingInfo

from ...request.errors import bad_value, unsupported_parameter, unsupported_value
from ..fields import Fields, missing, wrong_type
from ..generation import GenerationRequest, read_model
from ..pace import Pace
from .common_fields import read_generation, read_limit
from .logprobs import read_chat_scores
from .unsupported import CHAT, refuse_unsupported

ENDPOINT = "/v1/chat/completions"
ID_PREFIX = "chatcmpl-"
OBJECT_NAME = "chat.completion"
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TEMPLATE_KWARGS = 256
_RESERVED_TEMPLATE_KWARGS = frozenset({"messages", "add_generation_prompt", "tools", "documents", "chat_template"})
"""Template variables that have fields of their own."""
_UNSUPPORTED_IN_MESSAGE = ("tool_calls", "function_call", "audio", "refusal")
_MAX_PART_TYPE_CHARS = 40


async def read_chat(body: dict[str, Any], info: ServingInfo, max_sequences: int) -> GenerationRequest:
    """Check a body. Raises APIError."""
    fields = Fields(body)
    model = read_model(fields, info)
    refuse_unsupported(fields, CHAT)
    limit = read_limit(fields)
    async with Pace() as pace:
        messages = await _read_messages(fields, pace)
    prompt = ChatPrompt(
        messages=messages,
        add_generation_prompt=fields.flag("add_generation_prompt", default=True),
        template_kwargs=read_template_kwargs(fields),
    )
    return read_generation(
        fields,
        info,
        endpoint=ENDPOINT,
        model=model,
        prompts=(prompt,),
        prompt_param="messages",
        limit=limit,
        max_sequences=max_sequences,
        scores=read_chat_scores(fields),
    )


async def _read_messages(fields: Fields, pace: Pace) -> tuple[Mapping[str, Any], ...]:
    messages = fields.get("messages")
    if messages is None:
        raise missing("messages")
    if type(messages) is not list:
        raise wrong_type("messages", "a list of messages")
    if not messages:
        raise bad_value("messages", "must not be empty")
    pace.check_messages(messages, "messages")
    return tuple([await _read_message(message, f"messages[{index}]", pace) for index, message in enumerate(messages)])


async def _read_message(message: Any, where: str, pace: Pace) -> Mapping[str, Any]:
    if type(message) is not dict:
        raise wrong_type(where, "an object")
    await pace.tick()
    fields = Fields(message, where)
    role = fields.text("role")
    if role not in ROLES:
        raise bad_value(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    for name in _UNSUPPORTED_IN_MESSAGE:
        if fields.get(name):
            raise unsupported_parameter(fields.param(name))
    checked = {"role": role, "content": await _read_content(fields, pace)}
    for name in ("name", "tool_call_id"):
        if fields.get(name) is not None:
            checked[name] = fields.text(name)
    return checked


async def _read_content(fields: Fields, pace: Pace) -> str:
    content = fields.get("content")
    param = fields.param("content")
    if type(content) is not list:
        if content is not None and type(content) is not str:
            raise wrong_type(param, "a string or a list of text parts")
        return fields.text("content")
    if not content:
        raise bad_value(param, "must not be empty")
    pace.check_parts(content, param)
    texts = []
    for index, part in enumerate(content):
        where = f"{param}[{index}]"
        await pace.tick()
        if type(part) is not dict:
            raise wrong_type(where, "an object")
        part_fields = Fields(part, where)
        part_type = part_fields.text("type")
        if part_type != "text":
            named = part_type[:_MAX_PART_TYPE_CHARS]
            problem = f"must be `text`; parts of type `{named}` are not supported by this server"
            raise unsupported_value(f"{where}.type", problem)
        texts.append(part_fields.text("text"))
    return "".join(texts)


def read_template_kwargs(fields: Fields) -> Mapping[str, Any]:
    """Return the chat template's variables that the client sets. Raises APIError."""
    kwargs = fields.get("chat_template_kwargs")
    if kwargs is None:
        return {}
    if type(kwargs) is not dict:
        raise wrong_type("chat_template_kwargs", "an object")
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise bad_value("chat_template_kwargs", f"must have at most {MAX_TEMPLATE_KWARGS} entries")
    if not _RESERVED_TEMPLATE_KWARGS.isdisjoint(kwargs):
        raise bad_value("chat_template_kwargs", f"must not set {', '.join(sorted(_RESERVED_TEMPLATE_KWARGS))}")
    return kwargs
