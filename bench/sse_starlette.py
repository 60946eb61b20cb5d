"""The peer of `bench.sse`: a bare Starlette application on uvicorn (uvloop, httptools) that streams tokens.

No scheduler, no accounting, no metrics, no cancellation: a step's tokens go into one queue, a task passes each to its
stream's queue, and the stream's generator encodes a chunk of the same structure as quipu's, with orjson. With `text` it
detokenizes like most Python servers, through the DecodeStream of the tokenizers library.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
import tokenizers
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from tokenizers.decoders import DecodeStream

from bench.sse_steps import TokenSource
from quipu.actors.shared.checkpoint import DEMO


class Peer:
    def __init__(self, *, detokenize: bool) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        self.detokenize = detokenize
        self.steps: asyncio.Queue[list[int]] = asyncio.Queue()
        self.streams: list[asyncio.Queue[int]] = []

    async def complete(self, request: Request) -> StreamingResponse:
        body = orjson.loads(await request.body())
        return StreamingResponse(self.stream(body["model"]), media_type="text/event-stream")

    async def stream(self, model: str) -> AsyncIterator[bytes]:
        tokens: asyncio.Queue[int] = asyncio.Queue()
        self.streams.append(tokens)
        chunk: dict[str, Any] = {"id": "cmpl-req-0123456789abcdef01234567", "object": "text_completion"}
        chunk |= {"created": int(time.time()), "model": model}
        decoder = DecodeStream(skip_special_tokens=True)
        while True:
            token_id = await tokens.get()
            text = (decoder.step(self.tokenizer, token_id) or "") if self.detokenize else " word"
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
            yield b"data: " + orjson.dumps(chunk | {"choices": [choice]}) + b"\n\n"

    async def fan_out(self) -> None:
        while True:
            token_ids = await self.steps.get()
            for tokens, token_id in zip(self.streams, token_ids, strict=True):
                tokens.put_nowait(token_id)

    async def make_steps(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        step, tokens = 0, TokenSource()
        while question := await loop.sock_recv(control, 1):
            match question:
                case b"s":
                    step += 1
                    self.steps.put_nowait(tokens.of_step(step, len(self.streams)))
                case b"n":
                    await loop.sock_sendall(control, len(self.streams).to_bytes(8, "little"))
                case b"t":
                    await loop.sock_sendall(control, time.process_time_ns().to_bytes(8, "little"))
        os._exit(0)  # the streams are endless


async def run(control: socket.socket, *, detokenize: bool) -> None:
    control.setblocking(False)
    peer = Peer(detokenize=detokenize)
    app = Starlette(routes=[Route("/v1/completions", peer.complete, methods=["POST"])])
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(app, http="httptools", log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve([listener]))
        tasks.create_task(peer.fan_out())
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 1000)
        await asyncio.get_running_loop().sock_sendall(control, listener.getsockname()[1].to_bytes(8, "little"))
        await peer.make_steps(control)


if __name__ == "__main__":
    descriptor, core, mode = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    uvloop.run(run(socket.socket(fileno=int(descriptor)), detokenize=mode == "text"))
