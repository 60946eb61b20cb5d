"""An engine without a server: the same actors and the same engine process, called directly instead of over HTTP.

Used by `quipu bench latency` and `quipu bench throughput`. Each ask of a workload becomes the message to the tokenizer
that its body would become over HTTP, and ends as an `Outcome`, like a client's. No ledger is written.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import attrs
import trio

from quipu.actors.messages.handler import Closed, Delta, OutletEvent
from quipu.actors.wiring import Runtime, split

from ...api.openai.chat import read_chat
from ...api.openai.completions import read_completion
from ...request.errors import APIError
from ..settings import resolve_config
from .answer import Failure, Outcome, ReportedUsage
from .workload import Ask

DOMAIN = "bench"
POLL_S = 0.02


@attrs.frozen
class Engine:
    runtime: Runtime
    temperature: float

    async def ask(self, ask: Ask) -> Outcome:
        """Generate the requested number of tokens, whatever is sampled. Never raises for errors of the engine."""
        desk = self.runtime.desk
        model = desk.info.model_names[0]
        body = {"model": model, "temperature": self.temperature, **ask.fields, "ignore_eos": True}
        read = read_chat if "messages" in body else read_completion
        listener = Listener(anyio.current_time())
        try:
            wanted = await read(body, desk.info, 1)
        except APIError as error:
            return listener.outcome(Failure("invalid", str(error)))
        ticket = desk.open(wanted.encode(desk.new_request_id(), DOMAIN), "bench")
        try:
            ticket.mailbox.attach(listener.consume)
            await ticket.start()
            await listener.closed.wait()
        finally:
            ticket.leave()
        return listener.outcome()


class Listener:
    """Receives one request's events, and records their times."""

    def __init__(self, started_s: float) -> None:
        self.closed = trio.Event()
        self._started_s = started_s
        self._times_s: list[float] = []
        self._texts: list[str] = []
        self._end: Closed | None = None

    def consume(self, events: list[OutletEvent]) -> None:
        for event in events:
            if isinstance(event, Delta):
                self._times_s.append(anyio.current_time())
                self._texts.append(event.text)
            elif isinstance(event, Closed):
                self._end = event
                self.closed.set()

    def outcome(self, failure: Failure | None = None) -> Outcome:
        usage = ReportedUsage()
        if self._end is not None:
            record, error = self._end.record, self._end.error
            usage = ReportedUsage(record.prompt_tokens, record.completion_tokens, record.cached_tokens)
            failure = Failure(error.kind.name.lower(), error.message) if error is not None else failure
        return Outcome(
            started_s=self._started_s,
            ended_s=anyio.current_time(),
            output_at_s=tuple(self._times_s),
            text="".join(self._texts),
            usage=usage,
            failure=failure,
            saw_done=failure is None,
        )


@asynccontextmanager
async def open_engine(serve: argparse.Namespace, temperature: float, *, num_open: int) -> AsyncIterator[Engine]:
    """Start one as `quipu serve` would with these flags, with room for `num_open` requests; wait until it is ready.

    Raises CheckpointError, and EngineGivenUp in a group.
    """
    config, info = resolve_config(serve)
    config = attrs.evolve(config, max_open_requests=max(config.max_open_requests, num_open))
    async with split(config, info) as runtime:
        while not runtime.desk.health().is_ready:  # noqa: ASYNC110 -- once a run; the desk is asked, it does not call
            await trio.sleep(POLL_S)
        yield Engine(runtime, temperature)
