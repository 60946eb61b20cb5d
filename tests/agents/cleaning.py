"""Requests of the command lines as `--write` keeps them: whole in their structure, without texts, ids or file names.

`test_recorded_requests.py` sends them to a server in its own process.
"""

from __future__ import annotations

from typing import Any

LEFT_OUT = "…"
TEXTS = {"text", "description", "content", "output", "user_id", "prompt_cache_key"}
IDS = {"id", "call_id", "tool_use_id"}
ENVELOPES = {"client_metadata", "metadata", "input"}
"""Fields of which nothing is kept if they are objects: `input` is then that of an Anthropic call."""


def cleaned(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request without what its sender wrote in it. Ids are numbered: those that were equal still are."""
    numbers: dict[str, str] = {}

    def clean(value: Any, key: str, *, private: bool) -> Any:
        if isinstance(value, dict):
            private = private or key in ENVELOPES
            return {name: clean(inner, name, private=private) for name, inner in value.items()}
        if isinstance(value, list):
            return [clean(inner, key if isinstance(inner, str) else "", private=private) for inner in value]
        if not isinstance(value, str):
            return value
        if key in IDS:
            return numbers.setdefault(value, f"id_{len(numbers)}")
        if key == "arguments":
            return "{}"
        return LEFT_OUT if private or key in TEXTS else value

    told: dict[str, Any] = clean(body, "", private=False)
    return told
