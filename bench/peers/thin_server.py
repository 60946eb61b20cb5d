"""A thin HTTP server around a peer's engine, so that `python -m bench.peers` can load all of them alike.

    PEER_PYTHON bench/peers/thin_server.py transformers|openvino|llama MODEL PORT

Run with the interpreter of the peer's own environment; imports nothing of quipu. It knows `POST /v1/completions` with a
prompt of token ids, streamed and greedy, and writes one event a token; text is the token's name in the vocabulary, so
detokenizing costs a peer nothing. `GET /info` says what computes, and in which precision keys and values are kept.

An engine has `submit(number, prompt, max_tokens)` and `step()`, which gives (number, token id, is last) of all that
were drawn; both are called from one thread. It is a little faster than the peer's own server would be.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Engine(Protocol):
    info: dict[str, Any]
    gather_s: float
    """How long to wait for others when a first request comes: for engines whose batches nobody joins later."""

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None: ...

    def step(self) -> list[tuple[int, int, bool]]: ...


class Runner(threading.Thread):
    """Steps the engine while it has work, and hands what was drawn to the loop once a step."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self.inbox: queue.SimpleQueue[tuple[int, list[int], int]] = queue.SimpleQueue()
        self.outlets: dict[int, asyncio.Queue[tuple[int, bool]]] = {}
        self._engine = engine
        self._loop = loop

    def run(self) -> None:
        num_open = 0
        while True:
            if num_open == 0:
                first = self.inbox.get()
                time.sleep(self._engine.gather_s)
                self._engine.submit(*first)
                num_open = 1
            while not self.inbox.empty():
                self._engine.submit(*self.inbox.get())
                num_open += 1
            drawn = self._engine.step()
            num_open -= sum(is_last for _, _, is_last in drawn)
            self._loop.call_soon_threadsafe(self._deliver, drawn)

    def _deliver(self, drawn: list[tuple[int, int, bool]]) -> None:
        for number, token_id, is_last in drawn:
            self.outlets[number].put_nowait((token_id, is_last))


async def serve(engine: Engine, names: dict[int, str], port: int) -> None:
    runner = Runner(engine, asyncio.get_running_loop())
    runner.start()
    numbers = itertools.count()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        except asyncio.IncompleteReadError:  # somebody looked whether it is up
            writer.close()
            return
        if head.startswith("get"):
            body = json.dumps(engine.info).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        else:
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            asked = json.loads(await reader.readexactly(length))
            number = next(numbers)
            outlet = runner.outlets[number] = asyncio.Queue()
            runner.inbox.put((number, asked["prompt"], asked["max_tokens"]))
            writer.write(HEAD)
            is_last = False
            while not is_last:
                token_id, is_last = await outlet.get()
                finish_reason = "length" if is_last else None
                choice = {"text": names.get(token_id, ""), "token": token_id, "finish_reason": finish_reason}
                event = {"object": "text_completion", "choices": [{"index": 0, **choice}]}
                writer.write(b"data: %b\n\n" % json.dumps(event).encode())
            writer.write(b"data: [DONE]\n\n")
            del runner.outlets[number]
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", port, limit=1 << 24)
    async with server:
        await server.serve_forever()


def main() -> None:
    peer, model, port = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parent))
    engine = importlib.import_module(f"{peer}_engine").load(model)
    vocabulary = json.loads((Path(model) / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    asyncio.run(serve(engine, {token_id: name for name, token_id in vocabulary.items()}, int(port)))


if __name__ == "__main__":
    main()
