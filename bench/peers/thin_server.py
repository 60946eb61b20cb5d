"""A thin HTTP server around a peer's engine, so that `python -m bench.peers` can load all of them alike.

    PEER_PYTHON bench/peers/thin_server.py transformers|openvino|llama MODEL PORT

Run with the interpreter of the peer's own environment; imports nothing of quipu. It knows `POST /v1/completions` with a
prompt of token ids, streamed and greedy, and writes one event a token; text is the token's name in the vocabulary, so
detokenizing costs a peer nothing. `GET /info` says what computes, and in which precision keys and values are kept.

An engine has `submit(number, prompt, max_tokens)` and `step()`, which gives (number, token id, is last) of all that
were drawn; both are called from one thread. It has a process of its own, because some engines hold the interpreter's
lock while they compute. It is a little faster than the peer's own server would be.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Engine(Protocol):
    info: dict[str, Any]
    gather_s: float
    """How long to wait for others when a first request comes: for engines whose batches nobody joins later."""

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None: ...

    def step(self) -> list[tuple[int, int, bool]]: ...


def run_engine(engine: Engine, link: Connection) -> None:
    """Say what it is, then step it while it has work: requests come through `link`, what was drawn goes back."""
    link.send(engine.info)
    num_open = 0
    while True:
        if num_open == 0:
            first = link.recv()
            time.sleep(engine.gather_s)
            engine.submit(*first)
            num_open = 1
        while link.poll():
            engine.submit(*link.recv())
            num_open += 1
        drawn = engine.step()
        num_open -= sum(is_last for _, _, is_last in drawn)
        link.send(drawn)


async def serve(link: Connection, info: dict[str, Any], names: dict[int, str], port: int) -> None:
    outlets: dict[int, asyncio.Queue[tuple[int, bool]]] = {}
    numbers = itertools.count()

    def deliver() -> None:
        try:
            for number, token_id, is_last in link.recv():
                outlets[number].put_nowait((token_id, is_last))
        except EOFError:  # the engine's process has ended, and has said why
            asyncio.get_running_loop().stop()

    asyncio.get_running_loop().add_reader(link.fileno(), deliver)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        except asyncio.IncompleteReadError:  # somebody looked whether it is up
            writer.close()
            return
        if head.startswith("get"):
            body = json.dumps(info).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        else:
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            asked = json.loads(await reader.readexactly(length))
            number = next(numbers)
            outlet = outlets[number] = asyncio.Queue()
            link.send((number, asked["prompt"], asked["max_tokens"]))
            writer.write(HEAD)
            is_last = False
            while not is_last:
                token_id, is_last = await outlet.get()
                finish_reason = "length" if is_last else None
                choice = {"text": names.get(token_id, ""), "token": token_id, "finish_reason": finish_reason}
                event = {"object": "text_completion", "choices": [{"index": 0, **choice}]}
                writer.write(b"data: %b\n\n" % json.dumps(event).encode())
            writer.write(b"data: [DONE]\n\n")
            del outlets[number]
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", port, limit=1 << 24)
    async with server:
        await server.serve_forever()


def run_front(link: Connection, engines_end: Connection, model: str, port: int) -> None:
    """Answer HTTP, once the engine says what it is."""
    engines_end.close()  # else its process could end without this one learning of it
    vocabulary = json.loads((Path(model) / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    names = {token_id: name for name, token_id in vocabulary.items()}
    try:
        asyncio.run(serve(link, link.recv(), names, port))
    except EOFError:  # it could not be loaded, and has said why
        sys.exit(1)


def main() -> None:
    peer, model, port = sys.argv[1:]
    ours, theirs = multiprocessing.Pipe()
    # before the engine is loaded: neither threads nor weights are forked
    front = multiprocessing.get_context("fork").Process(
        target=run_front, args=(theirs, ours, model, int(port)), daemon=True
    )
    front.start()
    theirs.close()
    sys.path.insert(0, str(Path(__file__).parent))
    run_engine(importlib.import_module(f"{peer}_engine").load(model), ours)


if __name__ == "__main__":
    main()
