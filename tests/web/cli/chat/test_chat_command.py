"""The command `quipu chat`: what it sends, what goes to which stream, and the commands within the chat."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.web.cli.bench.bench_server import DONE, Reply, chat_event, serving
from tests.web.cli.chat.scripted_chats import Chat, answering, bodies, contents, said


def test_conversation(chat: Chat) -> None:
    """Each question is sent after the turns before it. Standard output is the answers; the counts are the server's and
    go to standard error."""
    replies = answering(said("a", " cord", prompt=9, cached=0), said("knots\n", prompt=1212, cached=1200))
    with serving(replies) as server:
        ended = chat(server.url, ["what is it?", "", "  ", "and in it?"])
    assert (ended.code, ended.output) == (0, "a cord\nknots\n")
    first, second = ended.notes
    assert first.startswith("prompt 9 · cached 0 · computed 9 · output 2 · first token ") and first.endswith(" ms")
    assert second.startswith("prompt 1,212 · cached 1,200 · computed 12 · output 1 · first token ")
    assert contents(bodies(server)[0]) == [("user", "what is it?")]
    assert contents(bodies(server)[1]) == [("user", "what is it?"), ("assistant", "a cord"), ("user", "and in it?")]


def test_request_fields(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a request has the first model, streaming with usage, and no field that the user did not ask for."""
    with serving(answering(said("x"), said("x"), said("x"))) as server:
        chat(server.url, ["hi"])
        monkeypatch.setenv("OPENAI_API_KEY", "from-env")
        chat(server.url + "/v1/", ["hi"], "--model", "m", "--no-thinking")
        flags = ("--system", "be brief", "--temperature", "0", "--max-tokens", "7", "--thinking")
        chat(server.url, ["hi"], "--api-key", "from-flag", *flags)
    plain, no_thinking, full = bodies(server)
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    question = {"role": "user", "content": "hi"}
    assert plain == {"model": "first", "messages": [question], **streaming}
    assert no_thinking["model"] == "m"
    assert no_thinking["chat_template_kwargs"] == {"enable_thinking": False}
    assert full == {
        "model": "first",
        "messages": [{"role": "system", "content": "be brief"}, question],
        "temperature": 0.0,
        "max_tokens": 7,
        "chat_template_kwargs": {"enable_thinking": True},
        **streaming,
    }
    assert [request.path for request in server.requests] == [
        *("/v1/models", "/v1/chat/completions"),
        "/v1/chat/completions",  # with --model nothing is asked before
        *("/v1/models", "/v1/chat/completions"),
    ]
    keys = [request.headers.get("authorization") for request in server.requests]
    assert keys == [None, None, "Bearer from-env", "Bearer from-flag", "Bearer from-flag"]


def test_unknown_counts_are_left_out(chat: Chat) -> None:
    """A count that the server does not report is not shown as 0; the reason for a cut answer is shown."""
    silent = Reply(pieces=[chat_event({"content": "x"}, "stop"), DONE])
    with serving(answering(said("x", cached=None, finish_reason="length"), silent)) as server:
        first, second = chat(server.url, ["hi", "hi"]).notes
    assert first.startswith("prompt 40 · output 1 · first token ")
    assert first.endswith(" ms · cut off at the maximum length")
    assert second.startswith("first token ")


def test_reasoning(chat: Chat) -> None:
    """Reasoning is shown before the answer, goes to standard error, and is not sent back."""
    thoughts = [chat_event({"reasoning_content": text}) for text in ("let me", " see")]
    thinking = Reply(pieces=[*thoughts, *said("yes").pieces])
    with serving(answering(thinking, said("no"))) as server:
        ended = chat(server.url, ["is it?", "sure?"])
    assert ended.output == "yes\nno\n"
    assert ended.notes[0] == "let me see" and ended.notes[1].startswith("prompt ")
    assert contents(bodies(server)[1])[1] == ("assistant", "yes")


def test_commands_within_the_chat(chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/system` and `/file` change the system message, `/reset` forgets the turns and keeps it, `/quit` ends the chat;
    none of them is sent."""
    document = tmp_path / "cords.txt"
    document.write_text("wörds\n", "utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = ["/system be brief", "one", f"/file {document}", "two", "/reset", "three", "/system", "/file", "four"]
    with serving(answering(*[said("x")] * 4)) as server:
        ended = chat(server.url, [*lines, "/file ~/cords.txt", "/help", "/quit", "never sent"])
    assert ended.code == 0
    one, two, three, four = map(contents, bodies(server))
    with_document = f'be brief\n\n<document name="{document}">\nwörds\n\n</document>'
    assert one == [("system", "be brief"), ("user", "one")]
    assert two == [("system", with_document), ("user", "one"), ("assistant", "x"), ("user", "two")]
    assert three == [("system", with_document), ("user", "three")]
    assert four == [("user", "three"), ("assistant", "x"), ("user", "four")]
    for name in (str(document), "~/cords.txt"):
        assert f"{name}: 6 characters in the system message" in ended.notes
    for command in ("/reset", "/system TEXT", "/file PATH", "/help", "/quit"):
        assert f"  {command} " in ended.errors
