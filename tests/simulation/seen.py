"""What a run has shown: plain data, made by `world.py` and judged by `oracle.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs

from tests.simulation.expected import Scored
from tests.simulation.passes import Passes
from tests.simulation.plan import Plan
from tests.simulation.points import Point


@attrs.frozen
class Numbers:
    """What a client is told of its prompt before the first token."""

    at: float
    prompt_tokens: int | None
    cached_tokens: int | None
    cache_write_tokens: int | None
    created_5m_tokens: int
    created_1h_tokens: int


@attrs.frozen
class Part:
    """What a part of an output means."""

    kind: str
    """`text`, `markup`, or of a call: `call`, `arguments`, `end`; `reasoning`."""
    text: str
    """Of a `call`, the tool's name."""
    call: int = -1


@attrs.frozen
class Piece:
    """More of a choice."""

    at: float
    choice: int
    text: str
    """The output as it was written, delimiters included."""
    num_tokens: int
    reason: str | None
    stop: str | None
    token_ids: tuple[int, ...]
    stop_token_id: int | None
    scores: tuple[Scored, ...] = ()
    prompt_scores: tuple[Scored, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    parts: tuple[Part, ...] = ()
    vector: bytes | None = None
    """That of its prompt."""
    num_thoughts: int = 0
    """Those of its tokens that are reasoning."""


@attrs.frozen
class End:
    """The end of a request as its client is told. `told` has the fields of its record, in the ledger's words."""

    at: float
    told: dict[str, Any]
    error: tuple[str, str] | None
    """Its kind and its message."""
    is_final: bool


Event = Numbers | Piece | End


@attrs.define
class Watched:
    """What one client saw. Times count from the start of the run."""

    opened_at: float
    refused: str | None = None
    """Why it could not be opened."""
    events: list[Event] = attrs.field(factory=list)
    left_at: float | None = None
    """When it left before the end."""
    ended_at: float = 0.0
    was_safe: bool = True
    """Its record would have survived a crash when it saw the end."""

    @property
    def ends(self) -> list[End]:
        return [event for event in self.events if isinstance(event, End)]

    @property
    def pieces(self) -> list[Piece]:
        return [event for event in self.events if isinstance(event, Piece)]

    @property
    def numbers(self) -> list[Numbers]:
        return [event for event in self.events if isinstance(event, Numbers)]

    @property
    def has_finished(self) -> bool:
        """Whether its client was told that all is well."""
        return bool(self.ends) and self.ends[0].told["outcome"] == "finished" and self.ends[0].error is None

    def pieces_of(self, choice: int) -> Iterator[Piece]:
        return (piece for piece in self.pieces if piece.choice == choice)


@attrs.frozen
class Explained:
    """What the server says of one prompt when its request has ended."""

    cached_tokens: int | None
    spans: tuple[tuple[int, int, str, str | None], ...]
    """First positions, ends, where their KV came from, and the tier of what was reused."""
    reason: str | None
    """Why its cached prefix ends where it does..."""
    token: int | None
    """...and the first position that is missing."""
    diverged_from: str | None
    """The request that continues differently."""
    evicted_at: float | None
    """When the next block was evicted, on the clock of the records..."""
    evicted_by: str | None
    """...and for which request."""
    idle_s: float | None


@attrs.frozen
class Applied:
    """A fault that has happened."""

    number: int
    kind: str
    began_s: float
    over_s: float


@attrs.define
class Seen:
    """Everything that the oracle knows."""

    plan: Plan
    watched: dict[int, Watched] = attrs.field(factory=dict)
    """By the number of the arrival."""
    explained: dict[int, tuple[Explained, ...]] = attrs.field(factory=dict)
    """The prompts of requests that the server can still explain, by the number of the arrival."""
    ledger: bytes = b""
    num_segments: int = 0
    metrics: str = ""
    statistics: dict[str, int] = attrs.field(factory=dict)
    """Of the cache, as they are logged..."""
    cache_rows: dict[tuple[str, str], dict[str, int]] = attrs.field(factory=dict)
    """...and as they are shown of each tenant and model."""
    leftovers: dict[str, int] = attrs.field(factory=dict)
    """What is still held, by what it is; empty if nothing is."""
    adapters: dict[str, str] = attrs.field(factory=dict)
    """Digests of the adapters, by name."""
    engines_left: tuple[int, ...] = ()
    """The ids of the engines in the end."""
    ended_with: str | None = None
    """The error with which the server ended."""
    last_fault_s: float = 0.0
    """When the last fault was over."""
    happened: list[Applied] = attrs.field(factory=list)
    """The faults at a time."""
    resets: list[float] = attrs.field(factory=list)
    """When the cache was reset."""
    passes: Passes = attrs.field(factory=Passes)
    num_engine_deaths: int = 0
    deaths: list[float] = attrs.field(factory=list)
    """When the server noticed that an engine had died."""
    crash_times: list[float] = attrs.field(factory=list)
    """When actors crashed."""
    applied: list[str] = attrs.field(factory=list)
    """The faults that happened, those at points included."""
    trace_sha256: str = ""
    num_messages: int = 0
    num_bytes: int = 0
    virtual_s: float = 0.0
    passed: Counter[Point] = attrs.field(factory=Counter)
    crashed: list[Point] = attrs.field(factory=list)
