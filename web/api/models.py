"""`GET /v1/models` and `GET /v1/models/{name}`, which the OpenAI and the Anthropic API share.

A client that sends `anthropic-version` is answered in the shape of the Anthropic API, every other one in OpenAI's. The
latter has a second list, `models`: Codex CLI's catalog, which it reads in place of `data`. All fields of its entries
are required: one that is missing makes Codex drop the whole list.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from quart import request
from quart_trio import QuartTrio

from quipu.actors.request_desk.interface import Desk, ServingInfo

from ..request.errors import no_model, speaks_anthropic
from ..request.request_context import current_request_context
from .generation import visible_to
from .model_schemas import DEFAULT_LIMIT, LIST, MAX_LIMIT, ONE
from .operation import route
from .query import Parameters, no_such_item

OWNER = "quipu"
AGENT_INSTRUCTIONS = (
    "You are a coding agent in the user's terminal. Use the tools that you are given to read files, run commands and "
    "make changes, and go on until the task is done. Change no more than was asked for, check that it works, and then "
    "say in a few sentences what you did."
)
"""Codex has longer instructions of its own for models that it knows, but sends those of the catalog for all others."""
MAX_TOOL_OUTPUT_TOKENS = 10_000
"""After which Codex truncates what a tool has printed; its own default."""
_EFFORTS = {"none": "No reasoning", "low": "Short", "medium": "Normal", "high": "Long"}


def install_models(app: QuartTrio, desk: Desk) -> None:
    """Register the routes."""

    @route(app, "GET /v1/models", LIST)
    async def list_models() -> dict[str, Any]:
        info = visible_to(current_request_context().principal, desk.info)
        return _list_anthropic(info, Parameters(request.args)) if speaks_anthropic() else _list_openai(info)

    @route(app, "GET /v1/models/<path:name>", ONE)  # model names contain slashes
    async def show_model(name: str) -> dict[str, Any]:
        info = visible_to(current_request_context().principal, desk.info)
        if name not in info.all_names:
            raise no_model(name, info.all_names)
        return _describe_anthropic(name, info) if speaks_anthropic() else _describe_openai(name, info)


def _list_openai(info: ServingInfo) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [_describe_openai(name, info) for name in info.all_names],
        "models": [_catalog_entry(name, info) for name in info.all_names],
    }


def _describe_openai(name: str, info: ServingInfo) -> dict[str, Any]:
    """Return one entry of the list.

    `root` is the model's own name, whichever name the client asked for; it is also the `parent` of an adapter.
    """
    is_ours, adapter = name not in info.passed_on, info.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": info.created if adapter is None else adapter.created,
        "owned_by": OWNER,
        "root": info.model_names[0] if is_ours else name,
        "parent": None if adapter is None else info.model_names[0],
        "max_model_len": _length(name, info),
        "block_size": info.block_size if is_ours else None,
    }


def _length(name: str, info: ServingInfo) -> int | None:
    """Return a model's context length; None if another server serves it and does not say."""
    return info.passed_on.get(name, info.max_model_len)


def _catalog_entry(name: str, info: ServingInfo) -> dict[str, Any]:
    can_switch = not info.output.template_variables.isdisjoint({"enable_thinking", "thinking", "reasoning_effort"})
    efforts = _EFFORTS if can_switch else {}
    return {
        "slug": name,
        "display_name": name,
        "description": None,
        "supported_reasoning_levels": [{"effort": effort, "description": text} for effort, text in efforts.items()],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "upgrade": None,
        "base_instructions": AGENT_INSTRUCTIONS,
        "supports_reasoning_summaries": can_switch,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "tokens", "limit": MAX_TOOL_OUTPUT_TOKENS},
        "supports_parallel_tool_calls": True,
        "context_window": _length(name, info),
        "experimental_supported_tools": [],
        "input_modalities": ["text"] if info.images is None else ["text", "image"],
    }


def _list_anthropic(info: ServingInfo, parameters: Parameters) -> dict[str, Any]:
    """Return a page of the models: `limit` of them, after `after_id` or before `before_id`. Raises APIError."""
    names = info.all_names
    limit = parameters.whole("limit", 1, MAX_LIMIT) or DEFAULT_LIMIT
    start, end = _place(names, parameters, "after_id", -1) + 1, _place(names, parameters, "before_id", len(names))
    if parameters.text("before_id") is not None and parameters.text("after_id") is None:
        page, has_more = names[max(start, end - limit) : end], end - start > limit  # the last ones before it
    else:
        page, has_more = names[start:end][:limit], end - start > limit
    return {
        "data": [_describe_anthropic(name, info) for name in page],
        "has_more": has_more,
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def _place(names: Sequence[str], parameters: Parameters, cursor: str, default: int) -> int:
    name = parameters.text(cursor)
    if name is None:
        return default
    if name not in names:
        raise no_such_item(cursor)
    return names.index(name)


def _describe_anthropic(name: str, info: ServingInfo) -> dict[str, Any]:
    length, adapter = _length(name, info), info.adapters.get(name)
    created = info.created if adapter is None else adapter.created
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "max_input_tokens": length,
        "max_tokens": length,
        "capabilities": None,
    }
