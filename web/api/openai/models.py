"""Models in the shape of the OpenAI API, with the field's usual extras. Shown by `web/api/models.py`.

The list has a second form, `models`: Codex CLI's catalog, which it reads in place of `data`. All fields of an entry are
required there, and one that is missing makes Codex drop the whole list.
"""

from __future__ import annotations

from typing import Any

from quipu.actors.request_desk.interface import ServingInfo

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


def list_models(info: ServingInfo) -> dict[str, Any]:
    """Return every name under which the model is served."""
    return {
        "object": "list",
        "data": [describe_model(name, info) for name in info.model_names],
        "models": [_catalog_entry(name, info) for name in info.model_names],
    }


def describe_model(name: str, info: ServingInfo) -> dict[str, Any]:
    """Return one entry of the list. `root` is the model's own name, whichever name the client asked for."""
    is_ours = name not in info.passed_on
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": OWNER,
        "root": info.model_names[0] if is_ours else name,
        "parent": None,
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
        "input_modalities": ["text"],
    }
