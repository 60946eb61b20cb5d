"""What the advisor remembers of the prompts of each tenant: digests, counts and request ids.

Synchronous. What must always hold: what is kept of a tenant is bounded, and displaces nothing of another one's, unless
there are more than MAX_TENANTS; all keys contain the scope, which is the tenant and the salt.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

import attrs

from .prompt_digests import PromptDigests

MAX_TENANTS = 256
MAX_PROMPT_MESSAGES = 8192
"""Messages of one tenant whose digests are kept, about 50 bytes each."""
MAX_OTHERS = 1024
"""Conversations, system prompts and lists of tools of one tenant, each."""
PROMPTS_OF_ONE = 3
"""Prompts that are kept of one conversation, the latest ones."""
VARIANTS = 8
"""Of one system prompt, or in turn in one conversation."""

_V = TypeVar("_V")


class Bounded(Generic[_V]):
    """The values that were used last, by digest."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values: OrderedDict[int, _V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def find(self, key: int) -> _V | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: int, value: _V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._max_values:
            self._values.popitem(last=False)

    def pop_oldest(self) -> _V:
        return self._values.popitem(last=False)[1]


@attrs.frozen
class SystemPrompt:
    """One of the system prompts that a conversation was sent with."""

    whole: int
    loose: int


@attrs.frozen
class ToolOrder:
    """The last list of tools with these members."""

    ordered: tuple[int, ...]
    """Digests with their keys as they are, in order..."""
    sorted_keys: tuple[int, ...]
    """...and sorted."""


@attrs.define
class TenantMemory:
    prompts: Bounded[list[PromptDigests]] = attrs.field(factory=lambda: Bounded(MAX_OTHERS))
    """By what a conversation begins with: its last prompts, newest last."""
    num_messages: int = 0
    tools: Bounded[ToolOrder] = attrs.field(factory=lambda: Bounded(MAX_OTHERS))
    """By the set of tools."""
    variants: Bounded[OrderedDict[int, bool]] = attrs.field(factory=lambda: Bounded(MAX_OTHERS))
    """By a system prompt without times and ids: its texts, and whether a conversation went on with each."""
    turns: Bounded[list[SystemPrompt]] = attrs.field(factory=lambda: Bounded(MAX_OTHERS))
    """By conversation: its system prompts in turn."""

    def keep(self, anchor: int, prompt: PromptDigests) -> None:
        """Keep a prompt as the last one that begins so."""
        others = self.prompts.find(anchor) or []
        if len(others) == PROMPTS_OF_ONE:
            self.num_messages -= len(others[0])
        self.prompts.put(anchor, [*others[-(PROMPTS_OF_ONE - 1) :], prompt])
        self.num_messages += len(prompt)
        while self.num_messages > MAX_PROMPT_MESSAGES and len(self.prompts) > 1:
            self.num_messages -= sum(map(len, self.prompts.pop_oldest()))


class AdviceMemory:
    def __init__(self) -> None:
        self._tenants: OrderedDict[str, TenantMemory] = OrderedDict()

    def of(self, tenant: str) -> TenantMemory:
        memory = self._tenants.setdefault(tenant, TenantMemory())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return memory
