"""Engines that report what a test's script says: for tiers, failed loads, routers and disaggregated pairs.

They use the same link and socket format as a real engine, so everything on the web side is real. A script says what an
engine, or a router in front of several, reports about each submitted sequence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import copy
from typing import Any

import attrs
import msgspec
import trio
import trio.testing

from quipu.actors.accountant.journal import Journal
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.fleet.supervisor import Death, EngineLink
from quipu.actors.messages.accountant import Side, StepReport
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.scheduler import Abort, Submit
from quipu.actors.messages.supervisor import EngineReady
from quipu.actors.request_desk.engine_pool import EngineMessage
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.kernels.fake import Dials
from tests.runtimes import BLOCK, Client, open_with_kept_vocabulary, runtime_config, serving_info

TOKEN = 40


@attrs.frozen
class Admit:
    """An admission of the sequence. `tiers` None: the engine does not count what it reuses."""

    read: int
    tiers: dict[str, int] | None
    reused: int | None = None
    """None: the sum of the tiers."""
    side: Side = Side.PREFILL
    number: int = 1
    step_s: float = 0.0
    """Duration of the step that admitted it."""
    tier_spans: dict[str, list[int]] = attrs.field(factory=dict)
    """Where the tokens of lower tiers are, by tier: start, end, start, end."""


@attrs.frozen
class Compute:
    start: int
    end: int


@attrs.frozen
class Write:
    start: int
    end: int


@attrs.frozen
class Revise:
    tier: str
    num_tokens: int


@attrs.frozen
class RouterEstimate:
    """An estimate by a router."""

    num_tokens: int


@attrs.frozen
class Token:
    """One token for the client; the last one also ends the sequence."""

    is_last: bool = False


@attrs.frozen
class Fail:
    """End the sequence with an error."""

    error: str


@attrs.frozen
class Leave:
    """End the sequence here, for another engine to continue it."""


@attrs.frozen
class Die:
    """Let the engine die, without a report. Anything else about the sequence is for its next incarnation."""


ScriptedEntry = Admit | Compute | Write | Revise | RouterEstimate | Token | Fail | Leave | Die
Script = Callable[[Submit], Sequence[Sequence[ScriptedEntry]]]
"""The entries about a sequence, report by report."""


def tokens(count: int) -> list[list[ScriptedEntry]]:
    """Return reports of one token each; the last one ends the sequence."""
    return [[Token(is_last=index == count - 1)] for index in range(count)]


class ScriptedHost:
    """Answers every Submit with its script. Ignores aborts of ended sequences, as every engine does."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._number = 0
        self._live: set[int] = set()
        self._reporting = trio.Lock()
        self._life = trio.CancelScope()
        self.taken: list[EngineMessage] = []
        """Everything that it was sent."""

    async def run(self, link: EngineLink) -> Death:
        self._number, self._reporting, self._life = 0, trio.Lock(), trio.CancelScope()
        self._live.clear()
        address = f"scripted:{link.incarnation}"
        await link.deliver([EngineReady(link.incarnation, 64, BLOCK, "scripted", "none", peer_address=address)])
        with self._life:
            async with trio.open_nursery() as nursery:
                while True:
                    for message in await link.take():
                        self.taken.append(message)
                        if isinstance(message, Submit):
                            self._live.add(message.sequence_id)
                            nursery.start_soon(self._play, link, over_the_wire(message))
                        elif isinstance(message, Abort) and message.sequence_id in self._live:
                            async with self._reporting:
                                await self._report(link, message.sequence_id, [Leave()])
        return Death("killed by the script")

    async def close(self) -> None:
        pass

    async def _play(self, link: EngineLink, submit: Submit) -> None:
        for entries in self._script(submit):
            await trio.sleep(0.01)
            if submit.sequence_id not in self._live:
                return
            if Die() in entries:
                self._life.cancel()
            async with self._reporting:
                await self._report(link, submit.sequence_id, entries)

    async def _report(self, link: EngineLink, sequence_id: int, entries: Iterable[ScriptedEntry]) -> None:
        empty = {"list": [], "bytes": b"", "bool": False, "int": 0, "dict": {}}
        types = StepReport.__annotations__
        columns: dict[str, Any] = {name: copy(empty[kind.split("[")[0]]) for name, kind in types.items()}
        self._number += 1
        columns.update(number=self._number, step=self._number)
        for entry in entries:
            self._fill(columns, sequence_id, entry)
        columns["num_running"] = len(self._live)
        await link.deliver([over_the_wire(StepReport(**columns))])

    def _fill(self, columns: dict[str, Any], sequence_id: int, entry: ScriptedEntry) -> None:
        def add(**values: Any) -> None:
            for name, value in values.items():
                columns[name].append(value)

        match entry:
            case Admit():
                reused = sum((entry.tiers or {}).values()) if entry.reused is None else entry.reused
                add(admitted_ids=sequence_id, admitted_number=entry.number, admitted_reused=reused)
                add(admitted_read=entry.read, admitted_miss_reasons="none", admitted_miss_tokens=0)
                add(admitted_tier_spans=entry.tier_spans)
                add(admitted_tiers=entry.tiers, admitted_sides=entry.side.value, admitted_step_s=entry.step_s)
            case Compute():
                add(span_ids=sequence_id, span_starts=entry.start, span_ends=entry.end)
            case Write():
                add(written_ids=sequence_id, written_starts=entry.start, written_ends=entry.end)
            case Revise():
                add(revised_ids=sequence_id, revised_tiers=entry.tier, revised_tokens=entry.num_tokens)
            case RouterEstimate():
                add(estimated_ids=sequence_id, estimated_tokens=entry.num_tokens)
            case Token():
                add(token_sequence_ids=sequence_id, token_ids=TOKEN)
                if entry.is_last:
                    add(ended_ids=sequence_id, ended_reasons=FinishReason.LENGTH.value)
                    self._end(add, sequence_id, None)
            case Fail():
                self._end(add, sequence_id, entry.error)
            case Leave():
                self._end(add, sequence_id, None)
            case Die():
                raise AssertionError("a dead engine reports nothing")

    def _end(self, add: Callable[..., None], sequence_id: int, error: str | None) -> None:
        self._live.discard(sequence_id)
        kind = None if error is None else "internal"
        add(terminal_ids=sequence_id, terminal_errors=error, terminal_error_kinds=kind)


def over_the_wire(message: Any) -> Any:
    """Return the message as it comes out of a socket."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


@asynccontextmanager
async def scripted_runtime(
    script: Script,
    *,
    journal: Journal | None = None,
    make_host: Callable[[Script], ScriptedHost] = ScriptedHost,
    **changes: Any,
) -> AsyncIterator[Client]:
    """Open the real web side with engines that report what `script` says; each has a host of its own."""
    config = runtime_config(**changes)
    async with open_with_kept_vocabulary(
        config, serving_info(config), lambda _: make_host(script), journal=journal, make_renderer=InlineRenderer
    ) as runtime:
        while not all(engine.is_ready for engine in runtime.desk.pool):
            await trio.lowlevel.checkpoint()
        yield Client(runtime, config, Dials())


def scripted_pair(script: Script, **options: Any) -> AbstractAsyncContextManager[Client]:
    """Open a runtime with two of them: number 0 is to compute prompts, number 1 to continue them."""
    roles = (EngineRole.PREFILL, EngineRole.DECODE)
    apart = {"num_engines": 2, "engine_roles": roles, "prefill_local_tokens": 0, "restart_backoff_s": 10.0}
    return scripted_runtime(script, **{**apart, **options})


async def settle_scripted(client: Client) -> None:
    """Wait until everything that was started has ended, and assert that nothing is left."""
    runtime = client.runtime
    with trio.fail_after(60):
        while (
            runtime.entry_store.num_open_accounts or runtime.desk.num_live_sequences or runtime.desk.num_open_requests
        ):
            await trio.sleep(0.01)
    await trio.testing.wait_all_tasks_blocked()
    assert not runtime.text_store.tracked
