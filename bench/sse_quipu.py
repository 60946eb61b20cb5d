"""The server of `bench.sse`: quipu's whole web side, with engines that produce tokens without computing.

Everything is what `quipu serve` runs in its web process except the sockets to the engine processes: each engine's host
is in this event loop, in a task of its own, and delivers step reports as they would arrive. Each has a socket to the
client, on which steps are requested.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from functools import partial
from typing import Any

import trio

from bench.sse_steps import TokenSource
from quipu.actors import wiring
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.config.runtime_config import RuntimeConfig
from quipu.actors.detokenizer.decoder import Decoder
from quipu.actors.fleet.frames import receive_some
from quipu.actors.fleet.supervisor import Death, EngineLink
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.scheduler import Submit
from quipu.actors.messages.supervisor import EngineReady
from quipu.actors.request_desk.interface import ServingInfo
from quipu.actors.shared.checkpoint import DEMO, read_info
from quipu.web.app import make_app
from quipu.web.http.server import serve
from quipu.web.telemetry import logs

ENDLESS = 1 << 30


class PlainDecoder(Decoder):
    """Its decoders return the same word for every token, to measure everything except detokenization."""

    class OneWord:
        def push(self, token_id: int) -> str:
            return " word"

        def flush(self) -> str:
            return ""

    def make_decoder(self, *, skip_special_tokens: bool, prompt_tail: Any) -> Any:
        return self.OneWord()


class TokenHost:
    """Replaces the engine: one token for every sequence in each step that the client requests."""

    def __init__(self, control: trio.SocketStream, tokens: TokenSource) -> None:
        self._control = control
        self._sending = trio.Lock()
        self._tokens = tokens
        self._new: list[Submit] = []
        self._ids: list[int] = []
        self._position = 0
        self.ended = trio.Event()

    async def run(self, link: EngineLink) -> Death:
        await link.deliver([EngineReady(link.incarnation, 2, 16, "bench", "none")])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take, link)
            while questions := await receive_some(self._control, 1):
                match questions:
                    case b"s":
                        await link.deliver([self._step()])
                    case b"n":
                        await self.answer(len(self._ids) + len(self._new))
                    case b"t":
                        await self.answer(time.process_time_ns())
            self.ended.set()
            await trio.sleep_forever()
        return Death("the benchmark is over")

    async def close(self) -> None:
        pass

    async def _take(self, link: EngineLink) -> None:
        while True:  # clients disconnect only at the end, when it no longer matters
            self._new += [message for message in await link.take() if isinstance(message, Submit)]

    async def answer(self, number: int) -> None:
        """Send a number; one send at a time, since the client may ask while its port is still being sent."""
        async with self._sending:
            await self._control.send_all(number.to_bytes(8, "little"))

    def _step(self) -> StepReport:
        """Report a step; a new prompt gets a span in it and its first token."""
        new, self._new = self._new, []
        admitted = [submit.sequence_id for submit in new]
        lengths = [len(submit.prompt_token_ids) for submit in new]
        running = self._ids
        self._ids = running + admitted
        self._position += 1
        count, position = len(running), self._position
        return StepReport(
            number=position,
            step=position,
            admitted_ids=admitted,
            admitted_number=[1] * len(admitted),
            admitted_reused=[0] * len(admitted),
            admitted_read=[0] * len(admitted),
            admitted_miss_reasons=["diverged"] * len(admitted),
            admitted_miss_tokens=[0] * len(admitted),
            span_ids=self._ids,
            span_starts=[position] * count + [0] * len(new),
            span_ends=[position + 1] * count + lengths,
            written_ids=[],
            written_starts=[],
            written_ends=[],
            token_sequence_ids=self._ids,
            token_ids=self._tokens.of_step(position, len(self._ids)),
            ended_ids=[],
            ended_reasons=[],
            terminal_ids=[],
            terminal_errors=[],
            terminal_error_kinds=[],
            num_running=len(self._ids),
            num_waiting=0,
            num_free_blocks=1,
            num_cached_blocks=0,
            num_preempted=0,
        )


def runtime_config(num_engines: int) -> RuntimeConfig:
    engine = EngineConfig(
        model_path=str(DEMO),
        executor="none",
        dtype="auto",
        load_format="auto",
        block_size=16,
        num_blocks=2,
        max_model_len=ENDLESS,
        max_num_seqs=1024,
        max_num_batched_tokens=2048,
        eos_token_ids=(),
    )
    return RuntimeConfig(
        engine=engine,
        model_names=("demo",),
        vocab_size=read_info(DEMO).vocab_size,
        kv_dtype="none",
        num_engines=num_engines,
        routing="round-robin",  # as many streams for each engine
    )


async def run(control_sockets: list[socket.socket], *, detokenize: bool) -> None:
    if not detokenize:
        setattr(wiring, "Decoder", PlainDecoder)  # noqa: B010 - an imported name, which mypy does not let others assign
    config = runtime_config(len(control_sockets))
    info = ServingInfo(config.model_names, 0, ENDLESS, 16, 2, config.vocab_size, {})
    tokens = TokenSource()
    hosts = [TokenHost(trio.SocketStream(trio.socket.from_stdlib_socket(sock)), tokens) for sock in control_sockets]
    host = hosts[0]
    async with wiring.open_runtime(config, info, hosts.__getitem__) as runtime, trio.open_nursery() as nursery:
        (address,) = await nursery.start(partial(serve, make_app(runtime.desk), host="127.0.0.1", port=0))
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 1000)
        await host.answer(address.port)
        await host.ended.wait()
        os._exit(0)  # the streams are endless


if __name__ == "__main__":
    descriptors, core, mode = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    logs.configure("warning")
    sockets = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors.split(",")]
    trio.run(partial(run, sockets, detokenize=mode == "text"))
