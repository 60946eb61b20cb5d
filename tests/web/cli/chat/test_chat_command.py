"""The command `quipu chat` without a terminal: what it sends, what goes to which stream, errors and exit codes."""

from __future__ import annotations

import io
import json
import signal
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest

from quipu.web.cli.bench.answer import Piece
from quipu.web.cli.bench.client import Target
from quipu.web.cli.bench.workload import Ask
from quipu.web.cli.chat.stoppable import ask_until_stopped
from quipu.web.cli.cli import main as quipu
from tests.processes import eventually
from tests.web.cli.bench.bench_server import DONE, BenchServer, Reply, Request, chat_event, serving, usage_event


@attrs.frozen
class Ended:
    """A chat that has ended."""

    code: int
    output: str
    errors: str

    @property
    def notes(self) -> list[str]:
        return self.errors.splitlines()


Chat = Callable[..., Ended]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Return a function that runs `quipu chat FLAGS` with lines on standard input."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(url: str, lines: Iterable[str], *flags: str) -> Ended:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = quipu(["chat", "--base-url", url, *flags])
        output = capsys.readouterr()
        return Ended(code, output.out, output.err)

    return run


MODELS = Reply(200, "application/json", [json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()])


def answering(*replies: Reply) -> Callable[[Request], Reply]:
    """Return an answer to `GET /v1/models` and then these to the questions, in order."""
    remaining = iter(replies)
    return lambda request: MODELS if request.method == "GET" else next(remaining)


def said(*texts: str, prompt: int = 40, cached: int | None = 32, finish_reason: str = "stop") -> Reply:
    details = {} if cached is None else {"cached_tokens": cached}
    pieces = [chat_event({"content": text}) for text in texts]
    return Reply(pieces=[*pieces, chat_event({}, finish_reason), usage_event(prompt, len(texts), **details), DONE])


def failed(status: int, message: str) -> Reply:
    return Reply(status, "application/json", [json.dumps({"error": {"message": message}}).encode()])


def bodies(server: BenchServer) -> list[Any]:
    return [request.body for request in server.requests if request.method == "POST"]


def contents(body: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


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


def test_commands_within_the_chat(chat: Chat, tmp_path: Path) -> None:
    """`/system` and `/file` change the system message, `/reset` forgets the turns and keeps it, `/quit` ends the chat;
    none of them is sent."""
    document = tmp_path / "cords.txt"
    document.write_text("wörds\n", "utf-8")
    lines = ["/system be brief", "one", f"/file {document}", "two", "/reset", "three", "/system", "/file", "four"]
    with serving(answering(*[said("x")] * 4)) as server:
        ended = chat(server.url, [*lines, "/help", "/quit", "never sent"])
    assert ended.code == 0
    one, two, three, four = map(contents, bodies(server))
    with_document = f'be brief\n\n<document name="{document}">\nwörds\n\n</document>'
    assert one == [("system", "be brief"), ("user", "one")]
    assert two == [("system", with_document), ("user", "one"), ("assistant", "x"), ("user", "two")]
    assert three == [("system", with_document), ("user", "three")]
    assert four == [("user", "three"), ("assistant", "x"), ("user", "four")]
    assert f"{document}: 6 characters in the system message" in ended.notes
    for command in ("/reset", "/system TEXT", "/file PATH", "/help", "/quit"):
        assert f"  {command} " in ended.errors


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/files x", "unknown command /files; /help lists them"),
        ("/file {folder}/none.txt", "there is no file {folder}/none.txt"),
        ("/file {folder}", "{folder} is not a file"),
        ("/file /dev/zero", "/dev/zero is not a file"),
        ("/file {folder}/binary", "{folder}/binary is not a text file in UTF-8"),
        ("/file ~nobody-has-this-name/x", "~nobody-has-this-name/x"),
        ("/file a\0b", "quipu: "),
    ],
)
def test_invalid_commands(chat: Chat, tmp_path: Path, line: str, message: str) -> None:
    """A command that cannot be obeyed is an error on one line, which ends a chat without a terminal."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with serving(answering()) as server:
        ended = chat(server.url, [line.format(folder=tmp_path), "never sent"])
    assert ended.code == 1 and bodies(server) == []
    (error,) = ended.notes
    assert error.startswith("quipu: ") and message.format(folder=tmp_path) in error


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (failed(401, "no key"), "requires a key: give --api-key or set OPENAI_API_KEY"),
        (failed(404, 'The model "m" does not exist.'), 'The model "m" does not exist. (404 from '),
        (failed(400, "the prompt\nis too long"), "HTTP 400: the prompt is too long"),
        (Reply(200, "text/html", [b"<p>"]), "did not answer with a stream: 'text/html'"),
        (Reply(is_cut=True), "closed the connection without an answer"),
        (Reply(pieces=[b'data: {"error": {"message": "engine died"}}\n\n']), "with an error: engine died"),
    ],
)
def test_failed_answers(chat: Chat, reply: Reply, message: str) -> None:
    """Each failure is one line with what to do about it, and ends a chat without a terminal: exit code 1."""
    with serving(answering(reply)) as server:
        ended = chat(server.url, ["hi", "never sent"], "--model", "m")
    assert (ended.code, ended.output) == (1, "") and len(bodies(server)) == 1
    (error,) = ended.notes
    assert error.startswith("quipu: ") and message in error


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(pieces=[chat_event({"content": "be"})], is_cut=True), "the answer broke off: "),
        (Reply(pieces=[chat_event({"content": "be"})]), "the answer broke off: the stream ended without"),
        (
            Reply(pieces=[chat_event({"content": "be"}), b'data: {"error": {"message": "engine died"}}\n\n', DONE]),
            "the server ended the answer with an error: engine died",
        ),
    ],
)
def test_errors_within_a_stream(chat: Chat, reply: Reply, message: str) -> None:
    """What had arrived stays on the screen, on a line of its own, and the error follows on the next."""
    with serving(answering(reply)) as server:
        ended = chat(server.url, ["hi"])
    assert (ended.code, ended.output) == (1, "be\n")
    (error,) = ended.notes
    assert error.startswith("quipu: ") and message in error


def test_no_model(chat: Chat) -> None:
    """If the first request fails, nothing is read: no server, a key that is missing or wrong, no list of models."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        for flags in ((), ("--model", "m")):
            (error,) = chat(url, ["hi"], *flags).notes
            assert f"no server at {url}: start one with `quipu serve` or `make serve`" in error
    with serving(lambda request: failed(401, "no such key")) as server:
        ended = chat(server.url, ["hi"])
        assert ended.code == 1 and "give --api-key or set OPENAI_API_KEY" in ended.errors
        assert "does not accept this key" in chat(server.url, ["hi"], "--api-key", "wrong").errors
    with serving(lambda request: Reply(200, "application/json", [b'{"data": []}'])) as server:
        assert "lists no model; name one with --model" in chat(server.url, ["hi"]).errors


@pytest.mark.parametrize(
    "flags",
    [
        ("--temperature", "nan"),
        ("--temperature=-1",),
        ("--max-tokens", "0"),
        ("--system", "\udcff"),
        ("--api-key", "ü"),
    ],
)
def test_invalid_flags(chat: Chat, flags: tuple[str, ...]) -> None:
    """A value that cannot be sent, or that no server would take, is refused at once."""
    with pytest.raises(SystemExit) as ended:
        chat("http://127.0.0.1:1", ["hi"], *flags)
    assert ended.value.code == 2


def test_invalid_key_in_the_environment(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that cannot be sent is an error that does not show it."""
    monkeypatch.setenv("OPENAI_API_KEY", "schlüssel")
    ended = chat("http://127.0.0.1:1", ["hi"])
    assert (ended.code, ended.errors) == (2, "quipu: OPENAI_API_KEY: a header must be printable ASCII\n")


def test_interrupt_stops_an_answer() -> None:
    """SIGINT during an answer closes the connection and raises nothing, however often; then it is itself again."""
    endless = Reply(pieces=[chat_event({"content": "x"})] * 100_000)
    before = signal.getsignal(signal.SIGINT)
    pieces: list[Piece] = []

    def take(piece: Piece) -> None:
        pieces.append(piece)
        if len(pieces) >= 3:
            signal.raise_signal(signal.SIGINT)

    with serving(lambda request: endless, pause_s=0.001) as server:
        target = Target(f"{server.url}/v1/chat/completions", {}, {"model": "m"}, {}, timeout_s=60.0)
        assert ask_until_stopped(target, Ask({"messages": []}), take) is None
        assert ask_until_stopped(target, Ask({"messages": []}), take) is None
        eventually(lambda: server.num_open == 0, "the server sees that both connections are closed")
    assert 4 <= len(pieces) < 1000
    assert signal.getsignal(signal.SIGINT) is before
