"""What became of a request's prompts in the cache, for `GET /v1/cache/explain`: made by the accountant, shown by `web`.

Numbers are those of the request's account. Nothing here is text of a prompt, and nothing is a token id.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from enum import StrEnum

import attrs

from .block_manager import CacheMiss
from .prompts import PartSpan
from .tiers import Tier


class BlockSource(StrEnum):
    """Where the KV of prompt positions came from."""

    REUSED = "reused"
    COPIED = "copied"
    """From a part of a cached block. Not counted as cached."""
    MOVED = "moved"
    """From another engine. Not counted as cached."""
    COMPUTED = "computed"


@attrs.frozen
class BlockSpan:
    """Consecutive prompt positions [start, end) whose KV came from one source."""

    start: int
    end: int
    source: BlockSource
    tier: Tier | None = None
    """Where the cached blocks were, if they were reused. None: they were not, or it is not known."""


class AdviceCode(StrEnum):
    """What a client, or the operator, could change for more of a prompt to be cached."""

    VOLATILE_PREFIX = "volatile_prefix"
    """An early message differs a little in each request of one conversation."""
    TOOLS_REORDERED = "tools_reordered"
    KEYS_REORDERED = "keys_reordered"
    PER_SESSION_HEADER = "per_session_header"
    """The same message differs a little in each conversation."""
    REASONING_STRIPPED = "reasoning_stripped"
    """An answer was sent back without the reasoning that it had."""
    ALTERNATING_SYSTEM_PROMPTS = "alternating_system_prompts"
    POOL_TOO_SMALL = "pool_too_small"


@attrs.frozen
class Advice:
    code: AdviceCode
    message: int | None
    """Index of the message; None for the tools."""
    token: int | None = None
    """Where it begins, if that is known."""
    num_blocks: int | None = None
    """`pool_too_small`: about how many blocks would have been enough."""


@attrs.frozen
class PromptOutline:
    """Where the parts of a chat lie in its prompt, in order and without gaps; compact, since there may be thousands.

    Numbers are packed as the machine's 32-bit integers, one for each part.
    """

    roles: tuple[str, ...] = ()
    role_of: bytes = b""
    """By part, its role's index in `roles`."""
    messages: bytes = b""
    """By part, the index of its message; -1: from none."""
    parts: bytes = b""
    """By part, its index in the message's content; -1: the content is not a list."""
    ends: bytes = b""
    """By part, the prompt tokens up to its end. The next one begins there."""

    @classmethod
    def of(cls, parts: Iterable[PartSpan]) -> PromptOutline:
        """Return the outline of these parts, each of which begins where the one before it ends, the first one at 0."""
        roles: dict[str, int] = {}
        role_of = bytearray()
        messages, indexes, ends = array("i"), array("i"), array("i")
        for part in parts:
            role_of.append(roles.setdefault(part.role, len(roles)))
            messages.append(-1 if part.message is None else part.message)
            indexes.append(-1 if part.part is None else part.part)
            ends.append(part.end)
        return cls(tuple(roles), bytes(role_of), messages.tobytes(), indexes.tobytes(), ends.tobytes())

    def __len__(self) -> int:
        return len(self.role_of)

    def __getitem__(self, index: int) -> PartSpan:
        message, part, ends = _numbers(self.messages)[index], _numbers(self.parts)[index], _numbers(self.ends)
        return PartSpan(
            None if message < 0 else message,
            None if part < 0 else part,
            self.roles[self.role_of[index]],
            ends[index - 1] if index else 0,
            ends[index],
        )

    def part_at(self, token: int) -> PartSpan | None:
        """Return the part that a position belongs to; None if there is none."""
        index = bisect_right(_numbers(self.ends), token)
        return self[index] if index < len(self) else None

    def start_of(self, message: int | None) -> int | None:
        """Return where a message begins; None: it is not in the prompt. The message None begins with the prompt."""
        index = next((index for index, at in enumerate(_numbers(self.messages)) if at == message), None)
        if message is None:
            return 0 if len(self) else None
        return None if index is None else self[index].start


def _numbers(packed: bytes) -> memoryview[int]:
    return memoryview(packed).cast("i")


NO_OUTLINE = PromptOutline()


@attrs.frozen
class PromptNotes:
    """What was noted about a prompt while it was tokenized."""

    outline: PromptOutline = NO_OUTLINE
    advice: tuple[Advice, ...] = ()


@attrs.frozen
class NamedRequest:
    request_id: str
    tenant: str


@attrs.frozen
class EvictedBlock:
    """The eviction of the first block that a prompt missed."""

    at: float
    """Unix seconds."""
    by: NamedRequest | None
    """Whose blocks took its place. None: not known."""
    idle_s: float | None
    """How long no request had used it."""


@attrs.frozen
class PromptEnd:
    """Where a prompt's cached prefix ended, and why."""

    miss: CacheMiss
    diverged_from: str | None = None
    """The request, of the same tenant and salt, whose prompt or answer continues differently."""
    evicted: EvictedBlock | None = None


@attrs.frozen
class ExplainedPrompt:
    """What became of one prompt. Numbers are in tokens; None: not known, or not kept apart for each prompt."""

    prompt_tokens: int | None
    cached_tokens: int | None
    restored_tokens: int | None
    recomputed_tokens: int | None
    blocks: tuple[BlockSpan, ...] = ()
    """In ascending order. Empty: no longer known."""
    outline: PromptOutline = NO_OUTLINE
    ended: PromptEnd | None = None
    """None: it was not admitted, or the engine does not say."""
    advice: tuple[Advice, ...] = ()
    cached_by_tier: Mapping[str, int] | None = None


@attrs.frozen
class Explanation:
    """What became of a request's prompts."""

    request_id: str
    tenant: str
    is_open: bool
    prompt_tokens: int | None
    """As in the usage record, like the following: sums over the admitted prompts."""
    cached_tokens: int | None
    restored_tokens: int
    recomputed_tokens: int
    prompts: tuple[ExplainedPrompt, ...]
    has_reasoning: bool = False
    cached_by_tier: Mapping[str, int] | None = None
    model: str = ""
    """The name that the client asked for, like the following as in the usage record."""
    adapter: str | None = None
    parent: str | None = None
