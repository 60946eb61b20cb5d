"""The fixture that runs `quipu chat` for the tests of this folder."""

from __future__ import annotations

import pytest

from tests.web.cli.chat.scripted_chats import Chat


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return Chat(monkeypatch, capsys)
