"""The `models` array of `GET /v1/models`, which Codex CLI reads."""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.messages.output import OutputFormat
from quipu.web.app import make_app
from tests.web.asgi_client import Client
from tests.web.asked import PLAIN, THINKING
from tests.web.fakes import INFO, FakeDesk

REQUIRED = {
    "slug": str, "display_name": str, "supported_reasoning_levels": list, "shell_type": str, "visibility": str,
    "supported_in_api": bool, "priority": int, "base_instructions": str, "supports_reasoning_summaries": bool,
    "support_verbosity": bool, "truncation_policy": dict, "supports_parallel_tool_calls": bool,
    "experimental_supported_tools": list,
}  # fmt: skip
"""Fields without which Codex 0.169 drops the list (`codex-rs/protocol/src/openai_models.rs`)."""
NULLABLE = {"description", "upgrade", "default_verbosity", "apply_patch_tool_type"}
"""Fields that must be there and may be null."""


async def catalog(output: OutputFormat) -> list[dict[str, Any]]:
    _, answer = await Client(make_app(FakeDesk(info=attrs.evolve(INFO, output=output)))).get("/v1/models")
    models: list[dict[str, Any]] = answer["models"]
    assert [entry["id"] for entry in answer["data"]] == [entry["slug"] for entry in models]
    return models


async def test_every_required_field() -> None:
    """Each entry has the fields that Codex requires, and the real context length."""
    for output in (PLAIN, THINKING):
        for entry in await catalog(output):
            assert entry.keys() >= NULLABLE
            assert {name: type(entry.get(name)) for name in REQUIRED} == REQUIRED
            assert entry["base_instructions"] and entry["context_window"] == INFO.max_model_len


async def test_reasoning_levels() -> None:
    """Reasoning levels are offered if the model's reasoning can be switched."""
    levels = [
        [level["effort"] for level in (await catalog(o))[0]["supported_reasoning_levels"]] for o in (PLAIN, THINKING)
    ]
    assert levels == [[], ["none", "low", "medium", "high"]]
