"""A request desk without an engine.

`FakeDesk` implements the protocol of `quipu.actors.request_desk.interface`: each ticket plays a script of outlet events
into a real mailbox. Its dials: the script, a closed desk, a failing start, the health.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import trio

from quipu.actors.cache_insight.cache_watch import CacheWatch
from quipu.actors.config.engine_roles import EngineRole, RolesRefused
from quipu.actors.messages.accountant import Caller
from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.messages.counts import UNKNOWN, Known
from quipu.actors.messages.handler import Closed, Delta, KeepAnswer, OutletEvent, PromptRead, Started
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.actors.messages.prompts import Prompt, Truncation
from quipu.actors.messages.scores import LikelyToken, ScoredToken
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.adapters import Adapters
from quipu.actors.request_desk.health import (
    CannotMove,
    DrainMode,
    EngineState,
    EngineStatus,
    Health,
    LastEngine,
    State,
    UnknownEngine,
)
from quipu.actors.request_desk.interface import DeskClosed, Explain, Forwarding, PromptLookUp, ServingInfo
from quipu.actors.request_desk.mailbox import Mailbox
from quipu.actors.shared.scored_tokens import ScoredColumns
from quipu.actors.shared.token_decoding import TokenText
from tests.no_adapters import no_adapters

NOBODY = Caller()
INFO = ServingInfo(
    model_names=("org/tiny", "tiny"),
    created=1_700_000_000,
    max_model_len=64,
    block_size=16,
    num_blocks=128,
    vocab_size=100,
    settings={"dtype": "float32"},
)


FOUND = PromptLookUp(0, 32, CacheMiss(MissReason.NONE, 32), num_prompt_tokens=40)


def record(
    *,
    outcome: Outcome = Outcome.FINISHED,
    prompt_tokens: int | None = 40,
    cached_tokens: int | None = 32,
    cached_by_tier: Mapping[str, int] | None = None,
    cache_write_tokens: int | None = 0,
    completion_tokens: int = 3,
    reasoning_tokens: int = 0,
    disputed: bool = False,
    cache_misses: tuple[CacheMiss, ...] = (),
) -> UsageRecord:
    return UsageRecord(
        request_id="",
        outcome=outcome,
        prompt=UNKNOWN if prompt_tokens is None else Known(prompt_tokens),
        cached=UNKNOWN if cached_tokens is None else Known(cached_tokens),
        cached_by_tier={"device": cached_tokens or 0} if cached_by_tier is None else cached_by_tier,
        cache_write=UNKNOWN if cache_write_tokens is None else Known(cache_write_tokens),
        completion_tokens=completion_tokens,
        reasoning_tokens=reasoning_tokens,
        computed_tokens=0,
        restored_tokens=0,
        recomputed_tokens=0,
        disputed=disputed,
        cache_misses=cache_misses,
    )


def columns(*tokens: ScoredToken) -> ScoredColumns:
    """Return scored tokens as the detokenizer sends them."""
    all_tokens: list[ScoredToken | LikelyToken] = [one for token in tokens for one in (token, *token.top)]
    scores = ScoredColumns({one.token_id: TokenText(one.text, one.utf8) for one in all_tokens}.__getitem__)
    for token in tokens:
        scores.append(token)
    return scores


STARTED = Started(prompt_tokens=40, cached_tokens=32, cache_write_tokens=0)


def hello(num_choices: int = 1) -> list[OutletEvent]:
    """Play "Hel" and "lo" for each choice, then a stop token without text."""
    events: list[OutletEvent] = [STARTED]
    for text in ("Hel", "lo"):
        events += [Delta(index, text, 1, None) for index in range(num_choices)]
    events += [Delta(index, "", 1, FinishReason.STOP) for index in range(num_choices)]
    events.append(Closed(record(completion_tokens=3 * num_choices), None))
    return events


def failure(kind: ErrorKind, message: str = "it broke", *, param: str | None = None, code: str | None = None) -> Closed:
    """Return the end of a request that failed before its admission."""
    outcome = Outcome.FAILED if kind is ErrorKind.INTERNAL else Outcome.REJECTED
    unknown = record(outcome=outcome, prompt_tokens=None, cached_tokens=None, completion_tokens=0)
    return Closed(unknown, RequestError(kind, message, param, code))


Script = Callable[[Encode], Sequence[OutletEvent]]


@attrs.define(eq=False)
class FakeTicket:
    """One open request; events that its script does not play, the test puts into the mailbox itself."""

    encode: Encode
    endpoint: str
    _desk: FakeDesk
    caller: Caller = attrs.field(factory=Caller)
    mailbox: Mailbox = attrs.field(factory=Mailbox)
    num_starts: int = 0
    num_leaves: int = 0
    expired_after_s: float | None = None
    played: list[OutletEvent] = attrs.field(factory=list)
    on_encoded: list[Callable[[], object]] = attrs.field(factory=list)

    @property
    def request_id(self) -> str:
        return self.encode.request_id

    @property
    def dropped(self) -> tuple[str, ...]:
        return self._desk.dropped if self.num_starts else ()

    async def start(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._desk.gate is not None:
            await self._desk.gate.wait()
        self.num_starts += 1
        if self._desk.start_error is not None:
            raise self._desk.start_error
        for event in self._desk.script(self.encode):
            self.played.append(event)
            self.mailbox.put(event)
        self._encoded()

    def when_encoded(self, call: Callable[[], object], /) -> None:
        """Call back at once: after the start of a script nothing is left to be encoded."""
        if self.num_starts or self.num_leaves:
            call()
        else:
            self.on_encoded.append(call)

    def _encoded(self) -> None:
        calls, self.on_encoded = self.on_encoded, []
        for call in calls:
            call()

    def expire(self, after_s: float) -> None:
        self.expired_after_s = after_s
        self.mailbox.put(failure(ErrorKind.TIMEOUT, f"longer than {after_s:g} seconds"))

    def leave(self) -> None:
        """Close the account, as the accountant would, unless the request has already ended."""
        self.num_leaves += 1
        self._encoded()
        if self.mailbox.closed is None:
            self.mailbox.put(Closed(self._cancelled(), None))

    def _cancelled(self) -> UsageRecord:
        started = [event for event in self.played if isinstance(event, Started)]
        num_tokens = sum(event.num_tokens for event in self.played if isinstance(event, Delta))
        if not started:
            return record(outcome=Outcome.CANCELLED, prompt_tokens=None, cached_tokens=None, completion_tokens=0)
        return record(
            outcome=Outcome.CANCELLED,
            prompt_tokens=started[-1].prompt_tokens,
            cached_tokens=started[-1].cached_tokens,
            completion_tokens=num_tokens,
        )


@attrs.define(eq=False)
class FakeDesk:
    script: Script = lambda encode: hello(len(encode.prompts) * encode.num_choices)
    info: ServingInfo = INFO
    upstreams: Forwarding | None = None
    cache: CacheWatch = attrs.field(factory=CacheWatch)
    closed: str | None = None
    """If set, no request can be opened, for this reason."""
    start_error: Exception | None = None
    gate: trio.Event | None = None
    """While it is closed, requests wait for the tokenizer."""
    state: State = State.READY
    tickets: list[FakeTicket] = attrs.field(factory=list)
    dropped: tuple[str, ...] = ()
    """What the tokenizer drops from the schemas of every request's tools."""
    num_resets: int = 0
    counted: Callable[[Prompt, str], int] = lambda prompt, param: 40
    read: PromptRead = attrs.field(factory=lambda: PromptRead([1, 2], "ab", ["a", "b"]))
    """What every prompt is read as."""
    found: PromptLookUp = FOUND
    """What every prompt finds in the cache."""
    looked_up: list[Encode] = attrs.field(factory=list)
    prefetched: list[bool] = attrs.field(factory=list)
    """Whether each of these was to be prefetched."""
    engine_list: list[EngineStatus] = attrs.field(factory=lambda: [EngineStatus(0, 1, EngineState.READY)])
    """Its engines; those that are drained or removed stay until the test removes them."""
    explain: Explain = lambda request_id, tenant: None
    drains: list[tuple[int, DrainMode, float | None, bool]] = attrs.field(factory=list)
    moves: list[tuple[int, int, int | None]] = attrs.field(factory=list)
    """Ids, how, after how many seconds, and whether by force."""
    adapters: Adapters = attrs.field(factory=no_adapters)
    why_no_roles: str = ""
    _num_ids: int = 0

    async def count_tokens(self, prompt: Prompt, prompt_param: str, tenant: str = "", /) -> int:
        await trio.lowlevel.checkpoint()
        return self.counted(prompt, prompt_param)

    async def read_prompt(
        self,
        prompt: Prompt,
        prompt_param: str,
        tenant: str = "",
        /,
        *,
        special: bool = True,
        with_text: bool = False,
        with_names: bool = False,
        truncation: Truncation | None = None,
    ) -> PromptRead:
        await trio.lowlevel.checkpoint()
        return self.read

    @property
    def num_open_requests(self) -> int:
        return sum(ticket.num_leaves == 0 for ticket in self.tickets)

    async def look_up(self, request: Encode, /, *, prefetch: bool = False) -> Sequence[PromptLookUp]:
        await trio.lowlevel.checkpoint()
        self.looked_up.append(request)
        self.prefetched.append(prefetch)
        return [self.found for _ in request.prompts]

    def new_request_id(self) -> str:
        self._num_ids += 1
        return f"r{self._num_ids}"

    def open(
        self, request: Encode, endpoint: str, caller: Caller = NOBODY, keep: KeepAnswer | None = None, /
    ) -> FakeTicket:
        if self.closed is not None:
            raise DeskClosed(self.closed)
        ticket = FakeTicket(request, endpoint, self, caller)
        self.tickets.append(ticket)
        return ticket

    def health(self) -> Health:
        return Health(self.state, 1, "" if self.state is State.READY else "because the test says so")

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def engines(self) -> Sequence[EngineStatus]:
        return tuple(self.engine_list)

    @property
    def control(self) -> FakeDesk:
        return self

    def add(self, count: int, role: EngineRole = EngineRole.MIXED) -> tuple[int, ...]:
        self._check_role(role)
        first = 1 + max((status.engine_id for status in self.engine_list), default=-1)
        added = tuple(range(first, first + count))
        self.engine_list += [EngineStatus(engine_id, 0, EngineState.STARTING, role=role) for engine_id in added]
        return added

    def set_role(self, engine_id: int, role: EngineRole) -> None:
        self._check_role(role)
        (index,) = [at for at, status in enumerate(self.engine_list) if status.engine_id == engine_id]
        self.engine_list[index] = attrs.evolve(self.engine_list[index], role=role)

    def _check_role(self, role: EngineRole) -> None:
        if self.why_no_roles and role is not EngineRole.MIXED:
            raise RolesRefused(self.why_no_roles)

    def drain(self, engine_id: int, mode: DrainMode, timeout_s: float | None = None, *, force: bool = False) -> None:
        by_id = {status.engine_id: index for index, status in enumerate(self.engine_list)}
        if engine_id not in by_id:
            raise UnknownEngine
        index = by_id[engine_id]
        others = [status for status in self.engine_list if status.engine_id != engine_id]
        if not force and all(status.state is EngineState.DRAINING for status in others):
            raise LastEngine
        self.engine_list[index] = attrs.evolve(self.engine_list[index], state=EngineState.DRAINING)
        self.drains.append((engine_id, mode, timeout_s, force))

    def move(self, engine_id: int, count: int, target_id: int | None = None) -> int:
        ids = [status.engine_id for status in self.engine_list if status.engine_id != engine_id]
        if not ids or target_id not in (None, *ids):
            raise CannotMove("No other engine is ready.")
        self.moves.append((engine_id, count, target_id))
        return min(count, 3)

    def render_metrics(self) -> bytes:
        return b"# TYPE quipu:open_accounts gauge\nquipu:open_accounts 0\n"

    @property
    def ticket(self) -> FakeTicket:
        """Return the only ticket that was opened."""
        (ticket,) = self.tickets
        return ticket


def scripted(*events: OutletEvent) -> Script:
    """Return a script that ignores the request."""
    return lambda encode: events
