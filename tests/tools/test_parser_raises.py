"""A parser that raises, which would be a bug, fails one request; the detokenizer goes on."""

from __future__ import annotations

import pytest

from quipu.actors.detokenizer.response_parsing.response_parser import ResponseParser
from tests.tools.scripted_model import CHAT, body, scripted_model


async def test_one_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets an internal error; the next request is served, and nothing is left of either.

    The detokenizer is not restarted, which would hold up the others.
    """

    def fail(*_: object) -> None:
        raise IndexError("planted")

    async with scripted_model("It rains.") as model:
        with monkeypatch.context() as planted:
            planted.setattr(ResponseParser, "push", fail)
            failed = await model.send(CHAT, body(CHAT))
        assert failed.status_code == 500 and failed.json()["error"]["code"]
        assert (await model.ask(CHAT))["choices"][0]["message"]["content"] == "It rains."
        assert set(model.client.runtime.desk.actor_restarts().values()) == {0}
