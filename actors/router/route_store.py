"""What the router knows of every sequence on its way and of every engine, kept where its death cannot lose it.

Owned by `wiring`, written by the router. Synchronous.

    inbox ──▶ reports, prompts (pending) ──▶ routed to an engine's queue, or kept until an engine is ready

What must always hold: a message leaves `reports` or `prompts` only once it was handled; a `Submit` is in exactly one of
`prompts`, `unrouted` and the engines' queues until an engine takes it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from ..cache_insight.cache_figures import HeldBlocks
from ..channel import Channel, Poster
from ..config.engine_roles import EngineRole, are_apart
from ..messages.accountant import StepReport
from ..messages.peers import Peer
from ..messages.router import EngineClosing, EngineDown, EngineUp, RoleChanged, SequenceEnded
from ..messages.scheduler import Submit
from ..messages.tiers import Tier
from ..request_desk.engine_pool import EngineMessage, SequenceMessage
from .key_index import Match
from .routing import Route, Routing

MAX_DEATHS = 2
"""Deaths of one message after which it is handled in the simplest way."""

EngineNews = StepReport | EngineUp | EngineDown | EngineClosing | RoleChanged | SequenceEnded
RouterMessage = SequenceMessage | EngineNews


@attrs.define(eq=False, repr=False)
class RoutedSequence:
    engine_id: int
    num_prompt_tokens: int
    """Those of resumed sequences include their output."""
    group_id: int
    route: Route


@attrs.define(eq=False, repr=False)
class Pair:
    """A prompt that is computed on one engine, and whose sequences continue on another."""

    decode_id: int
    """That other one."""
    peer: Peer | None = None
    """From where it is to fetch the prompt, until it is told to."""
    fetch_id: int | None = None
    """The sequence in whose name it fetches the prompt; None: it fetches nothing."""
    routes: dict[int, Route] = attrs.field(factory=dict)
    """By sequence, the room that is kept for it there."""
    is_over: bool = False
    """Nothing continues there any more."""


@attrs.define
class Group:
    """Sequences that go to one engine: the choices of a prompt, or all sequences of a request."""

    engine_id: int
    pair: Pair | None = None
    """None: they stay there."""
    num_routed: int = 0
    """Those that are held by the engine, or queued for it."""
    num_to_come: int = 0


@attrs.define(eq=False, repr=False)
class ReadyEngine:
    engine_id: int
    incarnation: int
    slot: int
    numerics: str
    queue: Channel[EngineMessage]
    """The pool's queue. The engine may leave the pool before the router hears of it."""
    role: EngineRole = EngineRole.MIXED
    peer_address: str = ""
    num_reports: int = 0
    is_closing: bool = False


@attrs.define(eq=False, repr=False)
class RouteStore:
    routing: Routing
    reports: deque[EngineNews] = attrs.field(factory=deque)
    prompts: deque[SequenceMessage] = attrs.field(factory=deque)
    unrouted: dict[int, Submit] = attrs.field(factory=dict)
    """Sequences that wait for an engine, in order."""
    unrouted_resumed: dict[int, Submit] = attrs.field(factory=dict)
    """Resumed sequences that wait for an engine; they come before the others."""
    sequences: dict[int, RoutedSequence] = attrs.field(factory=dict)
    prefilling: dict[int, RoutedSequence] = attrs.field(factory=dict)
    """Those of them that have no token yet."""
    pairs: dict[int, Pair] = attrs.field(factory=dict)
    """By sequence that is to continue on another engine, and has not arrived there."""
    groups: dict[int, Group] = attrs.field(factory=dict)
    engines: dict[int, ReadyEngine] = attrs.field(factory=dict)
    """By id."""
    by_slot: dict[int, ReadyEngine] = attrs.field(factory=dict)
    is_apart: bool = False
    """Any ready engine has a role."""
    num_handled: int = 0
    """Messages handled, except prompts that have killed the router too often."""
    num_deaths_in_hand: int = 0
    """How often the router has died of the message that it was handling."""

    def add(self, messages: Iterable[RouterMessage]) -> None:
        """Note messages that are to be handled: news of engines before prompts, each in order.

        Of resumed sequences the first submitted is first, in whatever order their engine has ended them: what clients
        are told of a prompt is the admission of its first choice, which must not find what the others have computed.
        """
        for message in sorted(messages, key=_place):
            if isinstance(message, SequenceMessage):
                self.prompts.append(message)
            else:
                self.reports.append(message)

    def held_blocks(self, keys: Sequence[bytes]) -> dict[int, HeldBlocks]:
        """Return, for each engine that finds the first of these blocks, how many of them it finds from there on.

        For the prefix tree; may lag behind the engines by the reports on their way. Takes a time in proportion to the
        engines, not to the blocks.
        """
        index, lowered, shared = self.routing.index, self.routing.lowered, self.routing.shared
        own = self._most_by_engine(index.match(keys))
        held = {
            engine_id: HeldBlocks(num_blocks, lowered.num_by_tier(slot, keys[:num_blocks]))
            for engine_id, (num_blocks, slot) in own.items()
        }
        for engine_id, (num_blocks, _) in self._most_by_engine(shared.match(keys)).items():
            mine = held.get(engine_id, HeldBlocks(0))
            if num_blocks > mine.num:
                lower = {**mine.lowered, Tier.REMOTE.value: num_blocks - mine.num}
                held[engine_id] = HeldBlocks(num_blocks, lower)
        return held

    def _most_by_engine(self, matches: Iterable[Match]) -> dict[int, tuple[int, int]]:
        """Return the most blocks that were found for each engine, and the slot for which they were."""
        most: dict[int, tuple[int, int]] = {}
        for match in matches:
            for slot, engine in self.by_slot.items():
                if match.slots >> slot & 1:
                    most[engine.engine_id] = max((match.num_blocks, slot), most.get(engine.engine_id, (0, slot)))
        return most

    def open_engines(self) -> list[ReadyEngine]:
        """Return the engines that sequences may be sent to."""
        return [engine for engine in self.engines.values() if not engine.is_closing]

    def note_roles(self) -> None:
        """Note whether engines differ in what they are for."""
        self.is_apart = are_apart(engine.role for engine in self.engines.values())

    def may_skip(self, report: StepReport) -> bool:
        """Whether a report says nothing that the router keeps: no keys, and no engine has a prompt to compute.

        A sequence is in `prefilling` before its engine can take it, so nothing that is on its way makes this wrong.
        """
        has_keys = report.stored_keys or report.removed_keys or report.lowered_keys or report.raised_keys
        has_shared = report.shared_keys or report.unshared_keys
        return not (self.prefilling or has_keys or has_shared or report.is_cleared)

    def record_death(self) -> int | None:
        """Note that the router has died; return the sequence that it was handling, if any."""
        self.num_deaths_in_hand += 1
        in_hand = None if self.reports or not self.prompts else self.prompts[0]
        return in_hand.sequence_id if isinstance(in_hand, Submit) else None

    @property
    def is_to_be_careful(self) -> bool:
        """Whether the current message must be handled without the code that has killed the router."""
        return self.num_deaths_in_hand >= MAX_DEATHS

    def take_off(self, queue: deque[Any]) -> None:
        """Remove the first message of a queue, which was handled."""
        message = queue.popleft()
        # a prompt that kills the router is its client's work
        self.num_handled += not (self.is_to_be_careful and isinstance(message, Submit))
        self.num_deaths_in_hand = 0


@attrs.frozen
class NewsInbox:
    """Where engines and supervisors post to the router, which is not woken for reports that it can skip."""

    store: RouteStore
    channel: Poster[RouterMessage]

    def post(self, message: RouterMessage, /) -> None:
        if not (isinstance(message, StepReport) and self.store.may_skip(message)):
            self.channel.post(message)


def _place(message: RouterMessage) -> float:
    return message.sequence_id if isinstance(message, Submit) and message.is_resumed else math.inf
