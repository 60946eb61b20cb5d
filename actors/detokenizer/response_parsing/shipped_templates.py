"""The formats of the model families that the server knows, as `response_template` dictionaries.

Beyond transformers' keys, `tool_calls` may be a list of alternatives, and `is_bare` says that a call may begin without
its opening delimiter where an answer begins.
"""

from __future__ import annotations

from typing import Any

from .template_building import Spec

_CALL = {"type": "function", "function": "{content}"}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_CHATML_TEXT = {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"}


def _calls(*alternatives: dict[str, Any], text: dict[str, Any] | None = None) -> Spec:
    return {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"tool_calls": list(alternatives), "content": text or {"content": "text"}},
    }


def _reasoning(opens: str, closes: str) -> Spec:
    return {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": opens, "close": closes, "content": "text"},
            "content": {"content": "text"},
        },
    }


_HERMES = _calls(
    {
        "open_pattern": r"\s*<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": _CALL,
    },
    text=_CHATML_TEXT,
)

TOOL_CALLS: dict[str, Spec] = {"hermes": _HERMES}
"""By the names that vLLM has for them."""

_THINK = _reasoning("<think>", "</think>")

REASONING: dict[str, Spec] = {"qwen3": _THINK, "deepseek_r1": _THINK}
