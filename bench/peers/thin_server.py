"""A thin HTTP server around a peer's engine, so that `python -m bench.peers` can send all of them the same load.

    PEER_PYTHON bench/peers/thin_server.py transformers|openvino|llama MODEL PORT

It runs with the interpreter of the peer's own environment and imports nothing of quipu. It serves `POST
/v1/completions` with a prompt of token ids, streamed and greedy, and writes one event per token; the text is the
token's name in the vocabulary, so detokenization costs a peer nothing. `GET /info` reports what computes, and the
precision of keys and values.

An engine has `submit(number, prompt, max_tokens)` and `step()`, which returns (number, token id, is last) for every
generated token; both are called from one thread. The engine has a process of its own, because some engines hold the GIL
while they compute. This is slightly faster than the peer's own server would be.
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
    """How long to wait for more requests after the first one, for engines whose batches cannot be joined later."""

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None: ...

    def step(self) -> list[tuple[int, int, bool]]: ...


def run_engine(engine: Engine, link: Connection) -> None:
    """Report what the engine is, then step it while it has work: requests arrive on `link`, tokens are sent back."""
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
        except EOFError:  # the engine process has exited and printed why
            asyncio.get_running_loop().stop()

    asyncio.get_running_loop().add_reader(link.fileno(), deliver)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        except asyncio.IncompleteReadError:  # a check whether the port is open
            writer.close()
            return
        if head.startswith("get"):
            body = json.dumps(info).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        else:
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            number = next(numbers)
            outlet = outlets[number] = asyncio.Queue()
            link.send((number, body["prompt"], body["max_tokens"]))
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
    """Serve HTTP once the engine has reported what it is."""
    engines_end.close()  # otherwise this process would not notice that the engine has exited
    vocabulary = json.loads((Path(model) / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    names = {token_id: name for name, token_id in vocabulary.items()}
    try:
        asyncio.run(serve(link, link.recv(), names, port))
    except EOFError:  # the engine could not be loaded and has printed why
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
