"""`quipu chat` against a real server: its counts are those of the responses; Ctrl-C stops an answer, not the chat."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import attrs
from anyio.abc import ByteStream
from anyio.from_thread import start_blocking_portal

from tests.e2e.servers import PATIENCE_S, QUIPU, Server, eventually
from tests.e2e.terminals import CTRL_C, CTRL_D, on_a_terminal

QUESTION = "A quipu is a ledger of knotted cords. What is tied into it, and by whom?"


@attrs.define(eq=False)
class Relay:
    """A TCP proxy that keeps the bytes that the server sends."""

    server: Server
    url: str = ""
    received: bytes = b""

    def reported(self, count: str) -> list[int]:
        """Return the value of a usage field in each response so far."""
        return [int(digits) for digits in re.findall(rb'"%b":(\d+)' % count.encode(), self.received)]

    async def serve(self, client: ByteStream) -> None:
        async with client, await anyio.connect_tcp(*self.server.address) as server, anyio.create_task_group() as both:
            both.start_soon(self._copy, client, server)
            await self._copy(server, client, keep=True)
            both.cancel_scope.cancel()

    async def _copy(self, source: ByteStream, target: ByteStream, *, keep: bool = False) -> None:
        async for data in source:
            if keep:
                self.received += data
            await target.send(data)
        await target.send_eof()


@contextmanager
def relaying(server: Server) -> Iterator[Relay]:
    relay = Relay(server)

    async def serve(*, task_status: Any) -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0) as listener:
            relay.url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
            task_status.started()
            await listener.serve(relay.serve)

    with start_blocking_portal("asyncio") as portal:
        served, _ = portal.start_task(serve)
        yield relay
        served.cancel()


def start_chat(url: str, *flags: str) -> subprocess.Popen[str]:
    """Start `quipu chat` with pipes for its streams."""
    return subprocess.Popen(
        [QUIPU, "chat", "--base-url", url, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answered(server: Server) -> list[dict[str, Any]]:
    """Return the log lines of all chat completions."""
    return [record for record in server.events("request.done") if record["endpoint"] == "/v1/chat/completions"]


def test_counts_are_those_of_the_responses(tiny: Server) -> None:
    """The second turn begins with the first one's prompt; every count shown is the one in that response's usage."""
    with relaying(tiny) as relay:
        flags = ("--max-tokens", "24", "--temperature", "0", "--system", "Twelve knots are tied into the first cord.")
        chat = start_chat(f"{relay.url}/v1", *flags)
        _, errors = chat.communicate(f"{QUESTION}\nAnd read by whom?\n", timeout=PATIENCE_S)
        assert chat.returncode == 0
        shown = [
            [int(number.replace(",", "")) for number in re.findall(r"(?:prompt|cached|computed|output) ([\d,]+)", line)]
            for line in errors.splitlines()
        ]
        prompts, cached, outputs = map(relay.reported, ("prompt_tokens", "cached_tokens", "completion_tokens"))
    assert shown == [
        [prompt, reused, prompt - reused, num_outputs]
        for prompt, reused, num_outputs in zip(prompts, cached, outputs, strict=True)
    ]
    assert len(shown) == 2
    assert cached[1] > 0


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(fake: Server) -> None:
    """Ctrl-C while an answer streams closes its connection; the next request includes what had arrived of it."""
    fake.wait_at_rest()
    before = len(answered(fake))
    with on_a_terminal(str(QUIPU), "chat", "--base-url", fake.url, "--max-tokens", "3000") as user:
        assert f"demo at {fake.url}" in user.read_until("> ")
        for _ in range(2):
            user.type(f"{QUESTION}\n")
            user.read_until("\n")  # the echo
            eventually(lambda: fake.metrics()["open_accounts"] == 1, "the answer is being generated")
            user.read_some()
            user.type(CTRL_C)
            user.read_until("\nstopped\r\n")
            assert user.read_until("> ").strip() == ">"
            fake.wait_at_rest()
        user.type("/reset\n")
        user.read_until("new chat")
        user.read_until("> ")
        user.type(CTRL_C)
        assert user.process.wait(PATIENCE_S) == 0
    first, second = eventually(lambda: lines if len(lines := answered(fake)[before:]) == 2 else None, "both log lines")
    assert (first["outcome"], second["outcome"]) == ("cancelled", "cancelled")
    assert second["prompt_tokens"] > 1.5 * first["prompt_tokens"] and second["cached_tokens"] > 0


def test_an_error_keeps_the_chat_on_a_terminal(fake: Server) -> None:
    """An unknown model is an error on one line, after which the user may go on, until Ctrl-D."""
    with on_a_terminal(str(QUIPU), "chat", "--base-url", fake.url, "--model", "none") as user:
        user.read_until("> ")
        user.type("hi\n")
        assert '"none" does not exist' in user.read_until("--base-url)")
        user.read_until("> ")
        user.type(CTRL_D)
        assert user.process.wait(PATIENCE_S) == 0


def test_interrupted_without_a_terminal(fake: Server) -> None:
    """Without a terminal SIGINT ends the command with the usual exit code, and the server leaks nothing."""
    fake.wait_at_rest()
    chat = start_chat(fake.url, "--max-tokens", "3000")
    assert chat.stdin is not None
    chat.stdin.write(f"{QUESTION}\nnever sent\n")
    chat.stdin.flush()
    eventually(lambda: fake.metrics()["open_accounts"] == 1, "the answer is being generated")
    chat.send_signal(signal.SIGINT)
    _, errors = chat.communicate(timeout=PATIENCE_S)
    assert (chat.returncode, errors) == (130, "")
    fake.wait_at_rest()
