"""What is known of each upstream: whether it answers, which models it serves, what it is doing. Synchronous.

What must always hold: an upstream is ready only after it has answered a probe, and not after a request or a probe could
not reach it; how long a probe waits grows while it stays down, up to a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs
import msgspec
import trio

from ..config.upstream_config import UpstreamConfig
from .engine_pool import PoolMember
from .health import Health, State, UpstreamState

PROBE_S = 5.0
"""Between two probes of an upstream that is ready."""
FIRST_BACKOFF_S = 0.25
"""Between the first two probes of one that is down; doubled each time, up to..."""
MAX_BACKOFF_S = 10.0
MAX_MODELS = 1024
"""Models of one upstream; further ones are passed over."""
MAX_MODEL_CHARS = 256
MAX_MODEL_LEN = 2**31 - 1
"""A longer context is treated as if none was said."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


def _length(model: _Model) -> int | None:
    length = model.max_model_len
    return length if length is not None and 0 < length <= MAX_MODEL_LEN else None


class _Models(msgspec.Struct):
    data: list[_Model]


@attrs.define(eq=False)
class Exchange:
    """A request that an upstream is answering."""

    scope: trio.CancelScope
    heard_at: float
    """When the upstream last sent something of it."""
    is_timed: bool
    """The request ends by itself after a time, so that a long silence does not matter."""
    given_up: str | None = None

    def give_up(self, why: str) -> None:
        """Treat it as failed."""
        self.given_up = why
        self.scope.cancel()


@attrs.define(eq=False, kw_only=True)
class Upstream(PoolMember):
    """One upstream: what an engine is to the pool of engines, but for blocks, of which it grants none."""

    config: UpstreamConfig
    health: Health = attrs.field(factory=lambda: Health(State.STARTING, 0, "it has not answered yet"))
    """Its incarnation is counted up whenever it becomes ready; while it is down, it is restarting."""
    models: dict[str, int | None] = attrs.field(factory=dict)
    """The names that it lists, in its order, and the context length that it says."""
    num_probes_failed: int = 0
    """Since it was ready."""
    num_blocks_known: int | None = None
    """Blocks of its cache, as far as its events say. None: it publishes none, or its tokenizer is not known."""
    wake: Callable[[], object] = lambda: None
    """Have it probed at once."""
    exchanges: dict[Exchange, None] = attrs.field(factory=dict)
    """What it is answering."""

    @property
    def url(self) -> str:
        return self.config.url

    @property
    def state(self) -> UpstreamState:
        is_down = self.health.state is State.RESTARTING
        return UpstreamState.DOWN if is_down else UpstreamState(self.health.state.value)

    def note_alive(self) -> bool:
        """Note that it has answered a probe; return whether it was not ready before."""
        if self.is_ready:
            return False
        self.health, self.num_probes_failed = Health(State.READY, self.health.incarnation + 1, ""), 0
        return True

    def note_failed(self, why: str) -> bool:
        """Note that it cannot be reached; return whether it was ready before."""
        was_ready = self.is_ready
        self.num_deaths += was_ready
        self.num_probes_failed += 1
        self.health = Health(State.RESTARTING, self.health.incarnation, why)
        return was_ready

    def suspect(self, why: str) -> bool:
        """Note that a request could not reach it, and have it probed at once; return whether it was ready before."""
        was_ready = self.is_ready
        if was_ready:
            self.note_failed(why)
            self.wake()
        return was_ready

    def silent_since(self, at: float) -> list[Exchange]:
        """Return what it has sent nothing of since then."""
        return [exchange for exchange in self.exchanges if exchange.heard_at <= at]

    def probe_in_s(self) -> float:
        """Return how long to wait before the next probe."""
        if self.is_ready:
            return PROBE_S
        return float(min(FIRST_BACKOFF_S * 2.0 ** min(self.num_probes_failed, 16), MAX_BACKOFF_S))

    def model_for(self, model: str) -> str:
        """Return what it calls a model: what it does not list is an operator's name for its first."""
        if model in self.models or not self.models:
            return model
        return next(iter(self.models))

    def read_models(self, body: bytes) -> bool:
        """Note which models it lists; return whether that has changed. What is no list changes nothing."""
        try:
            listed = msgspec.json.decode(body, type=_Models).data
        except (ValueError, RecursionError):
            return False
        models = {model.id: _length(model) for model in listed[:MAX_MODELS] if len(model.id) <= MAX_MODEL_CHARS}
        has_changed, self.models = models != self.models, models
        return has_changed


class UpstreamPool:
    """All upstreams, by id."""

    def __init__(self, upstreams: Sequence[Upstream], names: Sequence[str] = ()) -> None:
        """`names`: what every upstream serves, whatever it lists; empty: what each lists."""
        self._upstreams = {upstream.engine_id: upstream for upstream in upstreams}
        self._names = tuple(names)

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self._upstreams.values())

    def __getitem__(self, engine_id: int) -> Upstream:
        return self._upstreams[engine_id]

    def candidates(self, model: str, tried: Collection[int]) -> list[int]:
        """Return the upstreams that may be sent a request."""
        return [
            upstream.engine_id
            for upstream in self
            if upstream.is_ready
            and upstream.engine_id not in tried
            and (model in self._names or model in upstream.models)
        ]

    def models(self) -> Mapping[str, int | None]:
        """Return the models that are served, and their context lengths as far as they are known."""
        listed: dict[str, int | None] = {}
        for upstream in self:
            for name, length in upstream.models.items():
                listed.setdefault(name, length)
        if not self._names:
            return listed
        return {name: listed.get(name, next(iter(listed.values()), None)) for name in self._names}

    def stands_in(self, models: Collection[str]) -> bool:
        """Whether an upstream is ready that serves one of these models."""
        return any(self.candidates(model, ()) for model in models)

    def health(self) -> Health:
        """Return the health of a server that has nothing but upstreams: as good as its best one's.

        Everybody may see it, so it has no address.
        """
        num_started = sum(upstream.health.incarnation for upstream in self)
        missing = [upstream for upstream in self if not upstream.is_ready]
        if len(missing) < len(self._upstreams):
            first = missing[0].health.detail if missing else ""
            detail = f"{len(missing)} of {len(self._upstreams)} upstreams are not ready: {first}" if missing else ""
            return Health(State.READY, num_started, detail)
        is_starting = all(upstream.health.state is State.STARTING for upstream in missing)
        detail = f"no upstream is ready: {missing[0].health.detail if missing else 'there is none'}"
        return Health(State.STARTING if is_starting else State.RESTARTING, num_started, detail)
