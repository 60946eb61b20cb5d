"""The interface of the request desk: everything that the web layer sees of the actors.

A handler opens a `Ticket` for its request, calls `ticket.leave` at the end of the request's scope, and reads the
ticket's mailbox. `desk.py` implements it; a fake in the web layer's tests does, too.

What must always hold: `leave` is synchronous and may be called in any state and any number of times; after it no
Submit of the request is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs

from ..cache_insight.cache_watch import CacheWatch
from ..config.engine_roles import EngineRole
from ..config.pooling_config import Task
from ..messages.accountant import Caller
from ..messages.explanations import Explanation
from ..messages.handler import KeepAnswer, LookedUp, PromptRead
from ..messages.images import ImageFormat
from ..messages.outcomes import RequestError
from ..messages.output import OutputFormat
from ..messages.prompts import PartSpan, Prompt, Truncation
from ..messages.supervisor import EngineReady
from ..messages.tokenizer import Encode
from ..messages.upstream import Forward, ForwardOutlet
from .adapters import Adapter, Adapters
from .health import DrainMode, EngineStatus, Health
from .mailbox import Mailbox
from .upstream_pool import UpstreamPool


class DeskClosed(Exception):
    """No request can be opened now (draining, too many open, engine failed). Answer 503 with Retry-After."""


class PromptRefused(Exception):
    """A prompt that cannot be tokenized. Answer with `error`."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


@attrs.frozen
class VectorInfo:
    """The embeddings that a server makes."""

    num_dimensions: int = 0
    """Elements of each. 0: it makes none."""
    dimensions: tuple[int, ...] | None = ()
    """Lengths to which they may be cut. None: any."""
    default_prompt: str = ""
    """Text that the checkpoint puts before every other; by a reranker with a template, as a system message."""
    has_pair_template: bool = False
    """Whether a reranker's chat template has the words by which it is asked about a query and a document."""


@attrs.frozen
class ServingInfo:
    """What is served, for `/v1/models` and `/server_info`."""

    model_names: tuple[str, ...]
    """The first is the model's own name; a request may use any of them."""
    created: int
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
    adapters: Mapping[str, Adapter] = attrs.field(factory=dict)
    """Adapters of the model, by the names under which requests may ask for them."""
    task: Task = Task.GENERATE
    """What engines of this server compute."""
    vectors: VectorInfo = attrs.field(factory=VectorInfo)
    images: ImageFormat | None = None
    """How the model wants images. None: it reads none."""
    shared: frozenset[str] = frozenset()
    """Models of this server's engines that upstreams serve, too."""

    @property
    def all_names(self) -> tuple[str, ...]:
        """Return everything that a request may name, adapters last."""
        return (*self.model_names, *self.adapters)


def describe_pool(engine: EngineReady) -> dict[str, float]:
    """Return how many tokens an engine's blocks hold, and how many sequences of the maximum length at once."""
    num_tokens = (engine.num_blocks - 1) * engine.block_size
    if not engine.max_model_len:
        return {"num_tokens": num_tokens}
    return {"num_tokens": num_tokens, "max_concurrency": round(num_tokens / engine.max_model_len, 2)}


@attrs.define(eq=False)
class Placement:
    """Where a request goes that both this server's engines and an upstream can serve, until it was routed there."""

    is_passed_on: bool
    """To an upstream; else to an engine of this server."""
    _release: Callable[[], object] | None

    def on_routed(self) -> None:
        """Note that it was sent there, or is over. May be called any number of times."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Forwarding(Protocol):
    """Passes requests on to other servers."""

    @property
    def pool(self) -> UpstreamPool: ...

    def place(self, model: str, body: bytes | bytearray, tenant: str) -> Placement:
        """Choose where a request for a model goes that engines of this server serve, too.

        `on_routed` has to be called, however the request ends.
        """

    async def pass_on(self, forward: Forward, outlet: ForwardOutlet) -> None:
        """Have an upstream answer an open request, whose account is told of it. Returns when nothing more comes.

        To be cancelled when the client leaves.
        """


@attrs.frozen
class PromptLookUp(LookedUp):
    """What a prompt would find in the cache now, as the engine says to which it would be sent."""

    num_prompt_tokens: int = attrs.field(kw_only=True)
    spans: tuple[PartSpan, ...] = attrs.field(default=(), kw_only=True)
    """The tokens of each part of each message, if the prompt is a chat."""


Explain = Callable[[str, str | None], Explanation | None]
"""Returns the explanation of a request (its id) of this tenant (None: of any); None if none is known."""


class Ticket(Protocol):
    @property
    def request_id(self) -> str:
        """The id that the server gave it."""

    @property
    def mailbox(self) -> Mailbox: ...

    async def start(self) -> None:
        """Send the request to the tokenizer. Waits while its inbox is full, unless the request fails (`expire`)."""

    async def pass_on(self, outlet: ForwardOutlet) -> None:
        """Have an upstream answer the request, which is a `Forward`. Returns when nothing more comes."""

    def when_encoded(self, call: Callable[[], object], /) -> None:
        """Call `call` once when the request's prompts are no longer needed; at once if that is so already.

        They are not needed once all sequences are submitted, the request was refused, or it has left and nothing works
        on it. `call` must not raise or block.
        """

    @property
    def dropped(self) -> tuple[str, ...]:
        """Paths of what was dropped from the schemas of the request's tools, known before its first event."""

    def expire(self, after_s: float) -> None:
        """Fail a request whose deadline has passed, unless it has ended. Its mailbox gets the error at once."""

    def leave(self) -> None:
        """Release everything: account, sequences, mailbox. Called by the request's scope and by nothing else."""


class EngineControl(Protocol):
    def add(self, count: int, role: EngineRole = EngineRole.MIXED) -> tuple[int, ...]:
        """Start further engines, and return their ids. They serve when they are ready. Raises RolesRefused."""

    def set_role(self, engine_id: int, role: EngineRole) -> None:
        """Change what an engine is for from now on. What it holds, it completes. Raises UnknownEngine, RolesRefused."""

    def drain(self, engine_id: int, mode: DrainMode, timeout_s: float | None = None, *, force: bool = False) -> None:
        """Send an engine no more prompts, and end and remove it once it holds nothing.

        After `timeout_s` what it still holds is handed over. A second call can only make it faster. `force`: even the
        last one, whose requests then fail. Raises UnknownEngine, and LastEngine where no other engine is ready to
        serve.
        """

    def move(self, engine_id: int, count: int, target_id: int | None = None) -> int:
        """Have others continue some of an engine's running sequences, with their blocks; return how many.

        `target_id`: the engine that is to get them, if it still can when they come. Raises UnknownEngine and
        CannotMove.
        """


class Desk(Protocol):
    """Opens requests and answers questions about the server."""

    @property
    def info(self) -> ServingInfo: ...

    @property
    def cache(self) -> CacheWatch:
        """How the prefix cache was used lately."""

    @property
    def upstreams(self) -> Forwarding | None:
        """What passes requests on; None if there are no upstreams."""

    @property
    def control(self) -> EngineControl:
        """What starts and ends engines, where there are any."""

    @property
    def adapters(self) -> Adapters:
        """What loads and unloads adapters."""

    def open(
        self, request: Encode | Forward, endpoint: str, caller: Caller = ..., keep: KeepAnswer | None = None, /
    ) -> Ticket:
        """Open a request and its account; `request.request_id` comes from `new_request_id`. Raises DeskClosed.

        `keep` keeps its answer before its record is written.
        """

    async def count_tokens(self, prompt: Prompt, prompt_param: str, tenant: str = "", /) -> int:
        """Return the number of tokens that a request with this prompt would have. Opens no account, uses no engine.

        `prompt_param` names the prompt's field in errors. Counts as an open request while it waits for the tokenizer.
        Raises PromptRefused, also if the prompt exceeds the context length, and DeskClosed.
        """

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
        """Return a prompt's tokens, also of one that does not fit the context. Opens no account, uses no engine.

        `special`: with the tokens that the tokenizer puts around a text. Everything else is as for `count_tokens`.
        """

    async def look_up(self, request: Encode, /, *, prefetch: bool = False) -> Sequence[PromptLookUp]:
        """Return what each prompt of a request would find in the cache now. Opens no account.

        `prefetch`: let the engine begin to load what it finds in lower tiers. If False, nothing is changed.

        Counts as an open request until it is answered. Raises PromptRefused for what would be refused as a request, or
        if no engine can answer, and DeskClosed.
        """

    def new_request_id(self) -> str: ...

    @property
    def num_open_requests(self) -> int:
        """Return how many requests are open: accepted, and neither closed nor left."""

    @property
    def explain(self) -> Explain:
        """What explains requests that are open, or were the last to be closed."""

    def health(self) -> Health: ...

    def reset_prefix_cache(self) -> None:
        """Drop the prefix cache of every engine. Running requests are not affected."""

    def engines(self) -> Sequence[EngineStatus]:
        """Return the engines of this server, in the order of their ids; those that were removed are left out."""

    def render_metrics(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
