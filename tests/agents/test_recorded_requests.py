"""Requests of Claude Code and Codex get streams of the shapes that these clients are known to understand.

Requests and goldens are those of the sessions of `make agents`, which need the clients; these tests do not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agents.cleaning import cleaned
from tests.agents.shapes import stream_shape
from tests.tools.scripted_model import call, scripted_model

HERE = Path(__file__).parent
JSON_SCHEMA = "https://json-schema.org/draft/2020-12/schema"
CALLED = {
    "claude-code": "play_music",
    "claude-code-unchanged": "Write",
    "codex": "play_music",
    "codex-unchanged": "exec_command",
}


@pytest.mark.parametrize("name", CALLED)
async def test_answers_have_the_shapes_of_the_golden(name: str) -> None:
    """The question is answered with a call, and the call's result with text, in streams of the recorded shapes."""
    requests = json.loads((HERE / "requests" / f"{name}.json").read_text())
    goldens = json.loads((HERE / "goldens" / f"{name}.json").read_text())
    async with scripted_model("", num_blocks=4096, max_model_len=60_000) as model:
        for output, request, golden in zip([call(name=CALLED[name]), "It is done."], requests, goldens, strict=True):
            model.says(output)
            ((endpoint, body),) = request.items()
            answer = await model.send(endpoint, body)
            assert answer.status_code == 200, answer.text
            assert {endpoint: stream_shape(answer.text)} == golden


def test_requests_have_no_texts() -> None:
    """The recorded requests contain nothing that names a person, a folder or a machine."""
    for name in CALLED:
        for request in json.loads((HERE / "requests" / f"{name}.json").read_text()):
            ((_, body),) = request.items()
            assert cleaned(body) == body
            assert "/" not in json.dumps(body).replace("json-schema.org/draft/2020-12/schema", "").replace(
                "https://", ""
            )


def test_shapes_see_a_changed_stream() -> None:
    """A missing field, a changed type and another order of events change the shape; additional deltas do not."""

    def shape(*events: dict[str, Any]) -> Any:
        return stream_shape("".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events))

    start, delta, stop = (
        {"type": "start", "id": "a"},
        {"type": "delta", "text": "b"},
        {"type": "stop", "usage": {"n": 1}},
    )
    whole = shape(start, delta, stop)
    assert shape(start, delta, {"type": "delta", "text": "c"}, stop) == whole
    assert shape(start, stop, delta) != whole
    assert shape({"type": "start"}, delta, stop) != whole
    assert shape(start, delta, {"type": "stop", "usage": {"n": None}}) != whole
