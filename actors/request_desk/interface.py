"""The interface of the request desk: everything that the web layer sees of the actors.

A handler opens a `Ticket` for its request, calls `ticket.leave` at the end of the request's scope, and reads the
ticket's mailbox. `desk.py` implements it; a fake in the web layer's tests does, too.

What must always hold: `leave` is synchronous and may be called in any state and any number of times; after it no
Submit of the request is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import attrs

from ..cache_insight.cache_figures import CacheView
from ..messages.accountant import Caller
from ..messages.outcomes import RequestError
from ..messages.output import OutputFormat
from ..messages.prompts import Prompt
from ..messages.supervisor import EngineReady
from ..messages.tokenizer import Encode
from ..messages.upstream import Forward, ForwardOutlet
from .cache_answers import Explain, PromptLookUp
from .forwarding import Forwarding
from .mailbox import Mailbox


class DeskClosed(Exception):
    """No request can be opened now (draining, too many open, engine failed). Answer 503 with Retry-After."""


class PromptRefused(Exception):
    """A prompt that cannot be tokenized. Answer with `error`."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


class State(StrEnum):
    """What the supervisor knows about the engine."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    REFUSING = "refusing"  # no usage record can be written, so no request is admitted
    FAILED = "failed"


class EngineState(StrEnum):
    """What is known of one of several engines."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # it gets no more prompts, and ends when it has served what it holds
    DEAD = "dead"  # a successor is about to be started, unless it died too often


@attrs.frozen
class EngineStatus:
    """One engine, for operators."""

    engine_id: int
    """Counted from 0, and never given again."""
    incarnation: int
    """The last process started for it; counted over all engines of the server."""
    state: EngineState
    detail: str = ""
    """Why it is not ready."""
    ready: EngineReady | None = None
    """What it found out when it last became ready."""
    num_running: int = 0
    num_waiting: int = 0
    """Sequences, the ones on their way to it included."""
    blocks_used: int = 0
    blocks_total: int = 0
    """KV blocks without the null block; 0 until it is ready."""
    deaths: int = 0


class DrainMode(StrEnum):
    """What becomes of the sequences that a draining engine holds."""

    FINISH = "finish"  # it ends them itself; when the time is up, the rest is handed over
    HAND_OVER = "hand_over"  # other engines go on with them


class UnknownEngine(Exception):
    """There is no engine of that id. Answer 404."""


class LastEngine(Exception):
    """Without this engine nothing could be served any more. Answer 409."""


@attrs.frozen
class Health:
    state: State
    incarnation: int
    """Engines started so far."""
    detail: str
    """Why it is not ready."""
    actor_restarts: Mapping[str, int] = attrs.field(factory=dict)
    """How often each actor of the web process died and was restarted, by name."""

    @property
    def is_ready(self) -> bool:
        """Whether a token can be produced."""
        return self.state is State.READY

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is broken; also true while the first engine loads or the server drains."""
        return self.state in (State.STARTING, State.READY, State.DRAINING)


@attrs.frozen
class Withheld:
    """Why a server whose engine is ready does not say so: it has not shown yet that clients are answered."""

    state: State
    """What it says instead."""
    detail: str


@attrs.frozen
class ServingInfo:
    """What is served, for `/v1/models` and `/server_info`."""

    model_names: tuple[str, ...]
    """The first is the model's own name; a request may use any of them."""
    created: int
    """Unix seconds."""
    max_model_len: int
    """As configured, until an engine reports what its KV cache has room for."""
    block_size: int
    num_blocks: int | None
    """None until configured or reported by an engine."""
    vocab_size: int
    settings: dict[str, object]
    """Every resolved setting that the server was started with."""
    sampling_defaults: Mapping[str, float] = attrs.field(factory=dict)
    """Defaults of sampling fields, by name, where the checkpoint suggests others than the server's own."""
    output: OutputFormat = attrs.field(factory=OutputFormat)
    """How the model writes reasoning and calls."""
    engine: EngineReady | None = None
    """What the last engine that became ready has found out."""
    has_engines: bool = True
    """False: all requests are passed on, so that no text is tokenized here."""
    reads_forwards: bool = False
    """Prompts of requests that are passed on are tokenized here, for an estimate of what upstreams have cached."""
    passed_on: Mapping[str, int | None] = attrs.field(factory=dict)
    """Models whose requests are passed on to upstreams, and their context lengths if they are known."""
    shared: frozenset[str] = frozenset()
    """Models of this server's engines that upstreams serve, too."""


def describe_pool(engine: EngineReady) -> dict[str, float]:
    """Return how many tokens an engine's blocks hold, and how many sequences of the maximum length at once."""
    num_tokens = (engine.num_blocks - 1) * engine.block_size
    if not engine.max_model_len:
        return {"num_tokens": num_tokens}
    return {"num_tokens": num_tokens, "max_concurrency": round(num_tokens / engine.max_model_len, 2)}


class Ticket(Protocol):
    """One open request."""

    @property
    def request_id(self) -> str:
        """The id that the server gave it."""
        ...

    @property
    def mailbox(self) -> Mailbox: ...

    async def start(self) -> None:
        """Send the request to the tokenizer. Waits while its inbox is full, unless the request fails (`expire`)."""
        ...

    async def pass_on(self, outlet: ForwardOutlet) -> None:
        """Have an upstream answer the request, which is a `Forward`. Returns when nothing more comes."""
        ...

    def when_encoded(self, call: Callable[[], object], /) -> None:
        """Call `call` once when the request's prompts are no longer needed; at once if that is so already.

        They are not needed once all sequences are submitted, the request was refused, or it has left and nothing works
        on it. `call` must not raise or block.
        """
        ...

    @property
    def dropped(self) -> tuple[str, ...]:
        """Paths of what was dropped from the schemas of the request's tools, known before its first event."""
        ...

    def expire(self, after_s: float) -> None:
        """Fail a request whose deadline has passed, unless it has ended. Its mailbox gets the error at once."""
        ...

    def leave(self) -> None:
        """Release everything: account, sequences, mailbox. Called by the request's scope and by nothing else."""
        ...


class EngineControl(Protocol):
    """Starts and ends engines."""

    def add(self, count: int) -> tuple[int, ...]:
        """Start further engines, and return their ids."""
        ...

    def drain(self, engine_id: int, mode: DrainMode, timeout_s: float | None, *, force: bool = False) -> None:
        """Have an engine end once it holds nothing; see `Desk.drain_engine`, and `Desk.remove_engine` for `force`."""
        ...


class Desk(Protocol):
    """Opens requests and answers questions about the server."""

    @property
    def info(self) -> ServingInfo: ...

    @property
    def cache(self) -> CacheView:
        """How the prefix cache was used lately."""
        ...

    @property
    def upstreams(self) -> Forwarding | None:
        """What passes requests on; None if there are no upstreams."""
        ...

    def open(self, request: Encode | Forward, endpoint: str, caller: Caller = ..., /) -> Ticket:
        """Open a request and its account; `request.request_id` comes from `new_request_id`. Raises DeskClosed."""
        ...

    async def count_tokens(self, prompt: Prompt, prompt_param: str, tenant: str = "", /) -> int:
        """Return the number of tokens that a request with this prompt would have. Opens no account, uses no engine.

        `prompt_param` names the prompt's field in errors. Counts as an open request while it waits for the tokenizer.
        Raises PromptRefused, also if the prompt exceeds the context length, and DeskClosed.
        """
        ...

    async def look_up(self, request: Encode, /) -> Sequence[PromptLookUp]:
        """Return what each prompt of a request would find in the cache now. Opens no account and changes nothing.

        Counts as an open request until it is answered. Raises PromptRefused for what would be refused as a request, or
        if no engine can answer, and DeskClosed.
        """
        ...

    def new_request_id(self) -> str: ...

    @property
    def explain(self) -> Explain:
        """What explains requests that are open, or were the last to be closed."""
        ...

    def health(self) -> Health: ...

    def reset_prefix_cache(self) -> None:
        """Drop the prefix cache of every engine. Running requests are not affected."""
        ...

    def engines(self) -> Sequence[EngineStatus]:
        """Return the engines of this server, in the order of their ids; those that were removed are left out."""
        ...

    def add_engines(self, count: int) -> tuple[int, ...]:
        """Start further engines, and return their ids. They serve when they are ready."""
        ...

    def drain_engine(self, engine_id: int, mode: DrainMode, timeout_s: float | None = None) -> None:
        """Send an engine no more prompts, and end and remove it once it holds nothing.

        After `timeout_s` what it still holds is handed over. A second call can only make it faster. Raises
        UnknownEngine, and LastEngine where no other engine is ready to serve.
        """
        ...

    def remove_engine(self, engine_id: int, *, force: bool = False) -> None:
        """Drain an engine by handing over, and remove it. `force`: even the last one, whose requests then fail.

        Raises UnknownEngine and LastEngine.
        """
        ...

    def render_metrics(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        ...
