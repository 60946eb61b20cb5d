"""The front desk: what the web layer sees of the actors.

A handler opens a `Ticket` for its request, hangs `ticket.leave` on the request's scope, and reads the ticket's
mailbox. Nothing else connects web and actors.

What must always hold: `leave` is synchronous, may be called in any state and any number of times, and after it no
Submit of the request can go out.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import attrs

from ..messages.accountant import Caller
from ..messages.outcomes import RequestError
from ..messages.prompts import Prompt
from ..messages.supervisor import EngineReady
from ..messages.tokenizer import Encode
from .mailbox import Mailbox


class DeskClosed(Exception):
    """No request can be opened now (draining, too many open, given up). Answer 503 with Retry-After."""


class PromptRefused(Exception):
    """A prompt that cannot be tokenised, and why. Answer with the error."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


class State(StrEnum):
    """What the supervisor knows of the engine."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    REFUSING = "refusing"  # no usage record can be written, so nobody is admitted
    FAILED = "failed"


@attrs.frozen
class Health:
    state: State
    incarnation: int
    """Engines started so far."""
    detail: str
    """Why, where it is not ready."""

    @property
    def is_ready(self) -> bool:
        """A token can be produced."""
        return self.state is State.READY

    @property
    def is_healthy(self) -> bool:
        """Nothing is broken: also while the first engine loads or the server drains."""
        return self.state in (State.STARTING, State.READY, State.DRAINING)


@attrs.frozen
class ServingInfo:
    """What is served, for `/v1/models` and `/server_info`."""

    model_names: tuple[str, ...]
    """The first is the model's own; any of them may be asked for."""
    created: int
    """Unix seconds."""
    max_model_len: int
    """As configured, until an engine has said what its KV cache has room for."""
    block_size: int
    num_blocks: int | None
    """None until an engine has said it, where nobody else did."""
    vocab_size: int
    settings: dict[str, object]
    """Everything the server was started with, resolved."""
    engine: EngineReady | None = None
    """What the last engine that was ready has found out."""


def describe_pool(engine: EngineReady) -> dict[str, float]:
    """What an engine's blocks come to: tokens, and sequences of the longest length that they hold at once."""
    num_tokens = (engine.num_blocks - 1) * engine.block_size
    if engine.max_model_len is None:
        return {"num_tokens": num_tokens}
    return {"num_tokens": num_tokens, "max_concurrency": round(num_tokens / engine.max_model_len, 2)}


class Ticket(Protocol):
    """One open request."""

    @property
    def request_id(self) -> str:
        """The server's own id."""
        ...

    @property
    def mailbox(self) -> Mailbox: ...

    async def start(self) -> None:
        """Hand the request to the tokenizer; waits while its inbox is full, until the request fails (`expire`)."""
        ...

    def when_encoded(self, call: Callable[[], object], /) -> None:
        """Have `call` hear, once, that the request's prompts are not needed any more, at once if that is so already.

        Its sequences are submitted, or it was refused, or has left and nothing works on it. `call` must not raise or
        block.
        """
        ...

    def expire(self, after_s: float) -> None:
        """Its deadline has passed: fail it, if it has not ended. Its mailbox gets the error at once."""
        ...

    def leave(self) -> None:
        """Release everything: account, sequences, mailbox. Belongs on the request's scope and nowhere else."""
        ...


class FrontDesk(Protocol):
    @property
    def info(self) -> ServingInfo: ...

    def open(self, request: Encode, endpoint: str, caller: Caller = ..., /) -> Ticket:
        """Open the account of a request; `request.request_id` comes from `new_request_id`.

        Raises DeskClosed.
        """
        ...

    async def count_tokens(self, prompt: Prompt, prompt_param: str, tenant: str = "", /) -> int:
        """Tokens of a prompt as a request would have them; waits for the tokenizer. No account, no engine.

        `prompt_param` names the prompt's field in errors. Counts as an open request while it waits. Raises
        PromptRefused, also where the prompt does not fit the context, and DeskClosed.
        """
        ...

    def new_request_id(self) -> str: ...

    def health(self) -> Health: ...

    def reset_prefix_cache(self) -> None:
        """Have nothing found of what the prefix cache holds; requests under way are not touched."""
        ...

    def render_metrics(self) -> bytes:
        """Prometheus text format."""
        ...
