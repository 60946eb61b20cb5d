"""The chat that the tests of this folder run."""

from __future__ import annotations

import pytest

from tests.web.cli.chat.scripted_chats import Chat


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return Chat(monkeypatch, capsys)
