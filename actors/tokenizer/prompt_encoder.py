"""The interfaces between the tokenizer and the workers that encode prompts and check grammars.

`text_workers/pooled_encoder.py` and `text_workers/grammar_pool.py` implement them, with threads and processes.
`wiring.py` builds those and passes them to the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, TypeVarTuple

import attrs

from ..messages.explanations import NO_OUTLINE, Advice, PromptOutline
from ..messages.grammar import GrammarSpec
from ..messages.handler import PromptRead
from ..messages.images import PromptImage
from ..messages.outcomes import RequestError
from ..messages.prompts import Breakpoint, PartSpan, Prompt, PromptText, Truncation
from ..messages.tokenizer import Encode, ReadPrompt
from .context_length import PromptLimit, least_output
from .encoder import TextEncoder

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


MAX_READ_TOKENS = 1 << 20
"""Tokens of a prompt that a client may see, or have shortened, however long the context is."""


@attrs.frozen
class EncodedPrompt:
    token_ids: list[int]
    breakpoints: tuple[Breakpoint, ...] = ()
    echo: PromptText | None = None
    spans: tuple[PartSpan, ...] = ()
    """The tokens of each part of each message, if the chat asks for them."""
    outline: PromptOutline = NO_OUTLINE
    """The same in short."""
    advice: tuple[Advice, ...] = ()
    """What its client could change for more of it to be cached."""
    images: tuple[PromptImage, ...] = ()


@attrs.frozen
class EncodingOptions:
    """The fields of a request that decide how its prompts are encoded."""

    tenant: str
    prompt_param: str
    system_param: str = ""
    echo: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    owner: str | None = None
    """The owner of cached segments; None disables the cache."""
    request_id: str = ""
    """The server's own, for advice."""
    truncation: Truncation | None = None
    least_output: int = 1
    """Tokens of the context that a prompt has to leave."""

    def limit(self, max_model_len: int) -> PromptLimit:
        """Return how long a prompt may be before it is shortened."""
        if self.truncation is not None:
            return PromptLimit(MAX_READ_TOKENS, 0)
        return PromptLimit(max_model_len, self.least_output)


def owner_of(request: Encode) -> str:
    """Return who may share what is kept of a request: whoever shares its blocks.

    To anybody else, response times would reveal what the request asked for.
    """
    return f"{len(request.domain)}:{request.domain}{request.cache_salt}"


def options_of(request: Encode) -> EncodingOptions:
    return EncodingOptions(
        tenant=request.domain,
        prompt_param=request.prompt_param,
        system_param=request.system_param,
        echo=request.echo,
        skip_special_tokens=request.skip_special_tokens,
        add_special_tokens=request.add_special_tokens,
        owner=owner_of(request),
        request_id=request.request_id,
        truncation=request.truncation,
        least_output=least_output(request),
    )


class EncodingSlot(Protocol):
    """A request's place in the queue for a worker, and later its hold on one. Leave it at the end."""

    async def run(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Wait for the request's turn, then return what `call` returns. Once started, `call` runs to its end.

        Raises QueueFull after a rest.
        """
        ...

    async def encode(self, call: Callable[[TextEncoder], T]) -> T:
        """As `run`, with an encoder. If the worker is a process, cancelling this ends it.

        Raises WorkerUnavailable, what `call` raises, and QueueFull after a rest.
        """
        ...

    async def pause(self) -> None:
        """Let other tenants go first, between two texts of one request. This is a checkpoint."""
        ...

    def rest(self) -> None:
        """Give up the place or the worker until the next text."""
        ...

    def leave(self) -> None:
        """Give up the place or the worker. Later calls have no effect."""
        ...


class PromptEncoder(Protocol):
    def inline_slot(self) -> EncodingSlot:
        """Return the slot for a request that is encoded in the event loop (`prompt_sizes.is_short`)."""
        ...

    def enter(self, tenant: str, num_bytes: int) -> EncodingSlot:
        """Take a place in the queue for texts of `num_bytes`, 0 for the event loop. Raises QueueFull."""
        ...

    async def encode(
        self, prompt: Prompt, options: EncodingOptions, slot: EncodingSlot, max_model_len: int
    ) -> EncodedPrompt | RequestError:
        """Encode one prompt in `slot`; a chat enters a queue of its own.

        Raises TemplateError, LibraryPanic, WorkerUnavailable and QueueFull.
        """
        ...

    async def encode_alone(self, request: Encode, max_model_len: int) -> EncodedPrompt | RequestError:
        """Encode a request's only prompt in a slot of its own, without cached segments and advice.

        Return an error if the request would be refused. Raises as `encode`.
        """
        ...

    async def encode_bad_words(self, words: Sequence[str], slot: EncodingSlot) -> list[tuple[int, ...]]:
        """Return the ids of strings that no output may contain. Raises LibraryPanic."""
        ...

    async def encode_prediction(self, text: str, slot: EncodingSlot, max_model_len: int) -> tuple[int, ...]:
        """Return the ids of an expected output, without special tokens; none if it would not fit the context.

        Raises as `encode`.
        """
        ...

    async def read(self, question: ReadPrompt) -> PromptRead | RequestError:
        """Encode a prompt, even if it does not fit the context, with its text and the names of its tokens if asked for.

        Raises as `encode`.
        """
        ...

    async def count(self, prompt: Prompt, options: EncodingOptions, max_model_len: int) -> int | RequestError:
        """Count a prompt's tokens, even if they do not fit the context, unless it is refused untokenized.

        Raises as `encode`.
        """
        ...


class GrammarChecks(Protocol):
    def known(self, spec: GrammarSpec, options: EncodingOptions) -> str | RequestError | None:
        """Return the result if it takes no time; None: `check` the grammar."""
        ...

    async def check(self, spec: GrammarSpec, options: EncodingOptions) -> str | RequestError:
        """Return the grammar as text for the engine, or why it is refused. Raises QueueFull.

        The result is kept for the owner in `options` alone.
        """
        ...
