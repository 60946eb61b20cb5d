"""`quipu chat` when something fails or is stopped: one line that says what to do, and the exit code."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import NoReturn

import pytest

from quipu.web.cli.bench.answer import Piece
from quipu.web.cli.bench.client import Target
from quipu.web.cli.bench.workload import Ask
from quipu.web.cli.chat.stoppable import ask_until_stopped
from quipu.web.cli.cli import main as quipu
from tests.processes import eventually
from tests.web.cli.bench.bench_server import DONE, Reply, chat_event, serving
from tests.web.cli.chat.scripted_chats import Chat, Screen, answering, bodies, contents, failed, said


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
    """A command that cannot be executed is an error on one line, which ends a chat without a terminal."""
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


def throw(error: Exception) -> NoReturn:
    raise error


def test_error_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a terminal an error does not end the chat. The question that failed is not sent again with the next."""
    lines = iter(["one", "/none", " /two"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or throw(EOFError()))
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}", Screen())
    with serving(answering(failed(503, "come back"), said("x"))) as server:
        assert quipu(["chat", "--base-url", server.url]) == 0
    greeting, first, second, counts = capsys.readouterr().err.splitlines()
    assert greeting == f"first at {server.url}; /help lists the commands"
    assert first == "quipu: HTTP 503: come back" and second.startswith("quipu: unknown command /none")
    assert counts.startswith("prompt ")
    assert contents(bodies(server)[1]) == [("user", " /two")]


@pytest.mark.parametrize("what", ["closed", "full"])
def test_output_that_cannot_be_written(chat: Chat, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """If the reader of the output has gone (`| head`) or its disk is full, the answer is stopped and the chat ends."""
    reading, writing = os.pipe()
    os.close(reading)
    if what == "full":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    endless = Reply(pieces=[chat_event({"content": "x\n"})] * 100_000)
    with os.fdopen(writing, "w") as output, serving(answering(endless), pause_s=0.001) as server:
        monkeypatch.setattr("sys.stdout", output)
        ended = chat(server.url, ["hi", "never sent"])
    errors = "" if what == "closed" else "quipu: cannot write the answer: No space left on device\n"
    assert (ended.code, ended.errors) == (1, errors) and len(bodies(server)) == 1


def test_interrupt_stops_an_answer() -> None:
    """SIGINT during an answer closes the connection and raises nothing, however often; afterwards its handler is
    restored."""
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
    assert 4 <= len(pieces) < 100_000, "a stopped answer is not read to its end"
    assert signal.getsignal(signal.SIGINT) is before
