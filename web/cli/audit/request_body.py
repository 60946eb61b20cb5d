"""The body and headers of a request, for the wire and as a curl command.

Both are made by the same function: for curl, prompts stand as `$(seq …)`, and keys as variables of the shell. No key
and no value of a header is ever printed.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import orjson

from .drawn_prompts import Prompt, shell_ids
from .exchange import PATHS, Ask

ANTHROPIC_VERSION = "2023-06-01"
_MIN_RESPONSE_TOKENS = 16
"""OpenAI refuses fewer for a response."""


@attrs.frozen
class Target:
    """The server, and what all requests share."""

    url: str
    model: str
    key: str | None = attrs.field(default=None, repr=False)
    other_key: str | None = attrs.field(default=None, repr=False)
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    takes_ids: bool = False
    """Whether prompts of `/v1/completions` are token ids."""
    limit_field: str = "max_tokens"
    """What bounds the output of a chat: `max_completion_tokens` for some models."""
    takes_cache_control: bool = True


def body_of(ask: Ask, target: Target) -> bytes:
    return orjson.dumps(_body(ask, target, lambda prompt, as_ids: prompt.ids() if as_ids else prompt.text()))


def headers_of(ask: Ask, target: Target) -> dict[str, str]:
    key = target.other_key if ask.uses_other_key else target.key
    return {**_headers(ask, target, key), **target.headers}


def curl_of(ask: Ask, target: Target) -> str:
    """Return a command that sends the request from a POSIX shell with GNU's or BSD's seq."""
    written: dict[str, str] = {}
    nonce = secrets.token_hex(8)  # no model's name can contain it

    def place(prompt: Prompt, as_ids: bool) -> str:
        name = f"{nonce}-{len(written)}"
        written[name] = shell_ids(prompt.ids()) if as_ids else f'"{prompt.shell()}"'
        return name

    body = orjson.dumps(_body(ask, target, place)).decode()
    # The document's end is not quoted, so that the shell runs seq: it must not run what a server calls its model.
    body = re.sub(r"([\\$`])", r"\\\1", body)
    for name, text in written.items():
        body = body.replace(f'"{name}"', text)
    variable = "$OTHER_KEY" if ask.uses_other_key else "$KEY"
    has_key = (target.other_key if ask.uses_other_key else target.key) is not None
    headers = _headers(ask, target, variable if has_key else None)
    headers |= {name: "$" + re.sub(r"\W", "_", name.upper()) for name in target.headers}
    flags = [f'-H "{name}: {value}"' for name, value in headers.items()]
    words = ["curl", shlex.quote(target.url + PATHS[ask.api]), *(["-N"] if ask.is_stream else []), *flags]
    return " ".join([*words, "-d @- <<END"]) + f"\n{body}\nEND"


def _headers(ask: Ask, target: Target, key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if ask.api == "messages":
        headers["anthropic-version"] = ANTHROPIC_VERSION
    if key is not None:
        if ask.api == "messages":
            headers["x-api-key"] = key
        if ask.api != "messages" or not target.url.endswith(".anthropic.com"):
            headers["Authorization"] = f"Bearer {key}"  # most servers with this API take it, Anthropic does not
    return headers


def _body(ask: Ask, target: Target, write: Callable[[Prompt, bool], Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": target.model}
    match ask.api:
        case "chat":
            body["messages"] = [{"role": "user", "content": write(ask.prompts[0], False)}]
            body[target.limit_field] = ask.max_tokens
        case "completions":
            prompts = [write(prompt, target.takes_ids) for prompt in ask.prompts]
            body["prompt"] = prompts if len(prompts) > 1 else prompts[0]
            body["max_tokens"] = ask.max_tokens
        case "responses":
            body["input"] = write(ask.prompts[0], False)
            body["max_output_tokens"] = (
                ask.max_tokens if ask.max_tokens == 1 else max(ask.max_tokens, _MIN_RESPONSE_TOKENS)
            )
            body["store"] = False
        case _:
            text = {"type": "text", "text": write(ask.prompts[0], False)}
            marked = {"cache_control": {"type": "ephemeral"}} if target.takes_cache_control else {}
            body["messages"] = [{"role": "user", "content": [{**text, **marked}]}]
            body["max_tokens"] = ask.max_tokens
    if ask.is_stream:
        body["stream"] = True
        if ask.api in ("chat", "completions"):
            body["stream_options"] = {"include_usage": True}
    return body | dict(ask.fields)
