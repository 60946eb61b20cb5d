"""Decides what a client could change for more of its prompts to be cached, by comparing each with earlier ones.

Called for every chat while it is tokenized (`text_workers/pooled_encoder.py`). A prompt is compared with the last ones
of the same tenant and salt that begin alike: with the same first message of the user, disregarding times and ids. Where
two differ first, digests say in what.

What must always hold: advice needs evidence from at least two prompts of one tenant and salt; what is kept has no text.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator

from ..messages.explanations import Advice, AdviceCode
from ..messages.prompts import ChatPrompt
from .advice_memory import VARIANTS, AdviceMemory, SystemPrompt, TenantMemory, ToolOrder
from .prompt_digests import Digester, PromptDigests

MIN_SHARED_CHARS = 64
"""Characters of equal messages without which two prompts are not taken for one conversation."""
MIN_VARIANTS = 3
"""Texts of one system prompt, all used once only, that show that each request has its own."""
MAX_ADVICE = 8

_HEADER = re.compile(r"\s*[\w-]*(session|conversation|thread|billing|trace|user)[\w -]{0,20}[:=]", re.IGNORECASE)


class Advisor:
    def __init__(self, had_reasoning: Callable[[str], bool] = lambda request_id: False) -> None:
        """`had_reasoning(request_id)` returns whether the answer to a request is known to have contained reasoning."""
        self._digester = Digester()
        self._memory = AdviceMemory()
        self._had_reasoning = had_reasoning

    def slices(self, chat: ChatPrompt, tenant: str, scope: str, request_id: str) -> Iterator[tuple[Advice, ...] | None]:
        """Yield None after each slice of the work, and the advice at the end. `scope` is the tenant with the salt."""
        made = None
        for made in self._digester.slices(chat, request_id):
            if made is None:
                yield None
        assert made is not None
        yield self._advise(chat, made, tenant, self._digester.digest(scope.encode("utf-8", "surrogatepass")))

    def _advise(self, chat: ChatPrompt, prompt: PromptDigests, tenant: str, scope: int) -> tuple[Advice, ...]:
        memory, digest = self._memory.of(tenant), self._digester.digest
        found: dict[tuple[AdviceCode, int | None], None] = {}
        if len(prompt.tools) > 0 and (code := self._about_tools(prompt, memory, scope)) is not None:
            found[code, None] = None
        first = prompt.first_user
        if first is not None:
            anchor = digest(scope, prompt.loose[first])
            old, end = _closest(memory.prompts.find(anchor) or [], prompt)
            for code, at in self._about_difference(old, prompt, end, first):
                found[code, at] = None
            if prompt.has_system:
                is_continued = old is not None and end > first and len(prompt) > len(old)
                system_code = self._about_system(chat, prompt, memory, scope, is_continued=is_continued)
                if system_code is not None:
                    found[system_code, 0] = None
                if self._alternates(prompt, memory, scope, first):
                    found[AdviceCode.ALTERNATING_SYSTEM_PROMPTS, 0] = None
            memory.keep(anchor, prompt)
        indexes = {part.chat_message: part.message for part in reversed(chat.parts)}
        places = [(code, None if at is None else indexes.get(at, at)) for code, at in found]
        return tuple(Advice(code, message) for code, message in places[:MAX_ADVICE])

    def _about_tools(self, prompt: PromptDigests, memory: TenantMemory, scope: int) -> AdviceCode | None:
        ordered = tuple(tool for tool, _ in prompt.tools)
        sorted_keys = tuple(tool for _, tool in prompt.tools)
        key = self._digester.digest(scope, *sorted(sorted_keys))
        before = memory.tools.find(key)
        memory.tools.put(key, ToolOrder(ordered, sorted_keys))
        if before is None or before.ordered == ordered:
            return None
        return AdviceCode.KEYS_REORDERED if before.sorted_keys == sorted_keys else AdviceCode.TOOLS_REORDERED

    def _about_difference(
        self, old: PromptDigests | None, new: PromptDigests, at: int, first_user: int
    ) -> Iterator[tuple[AdviceCode, int]]:
        """Yield possible causes of the first difference of two prompts, in message `at`."""
        if old is None or at >= len(new):
            return
        if at == len(old):
            if self._lost_its_reasoning(old, new):
                yield AdviceCode.REASONING_STRIPPED, at
            return
        if old.sorted_keys[at] == new.sorted_keys[at] and old.ordered[at] != new.ordered[at]:
            yield AdviceCode.KEYS_REORDERED, at
        elif old.unreasoned[at] == new.unreasoned[at]:
            if old.has_reasoning[at] and not new.has_reasoning[at]:
                yield AdviceCode.REASONING_STRIPPED, at
        elif old.loose[at] == new.loose[at] and at <= first_user and _shares_rest(old, new, at, first_user):
            yield AdviceCode.VOLATILE_PREFIX, at

    def _lost_its_reasoning(self, old: PromptDigests, new: PromptDigests) -> bool:
        """Whether `new` continues after the answer to `old`, without the reasoning of that answer."""
        at = len(old)
        return (
            new.roles[at] == "assistant"
            and not new.has_reasoning[at]
            and "user" not in new.roles[at:]
            and self._had_reasoning(old.request_id)
        )

    def _about_system(
        self, chat: ChatPrompt, prompt: PromptDigests, memory: TenantMemory, scope: int, *, is_continued: bool
    ) -> AdviceCode | None:
        """Return advice on the variants of this system prompt, ignoring times and ids."""
        if prompt.num_chars[0] < MIN_SHARED_CHARS:
            return None
        key, whole = self._digester.digest(scope, prompt.loose[0]), prompt.whole[0]
        texts = memory.variants.find(key)
        if texts is None:
            texts = OrderedDict()
            memory.variants.put(key, texts)
        is_new = whole not in texts
        texts[whole] = is_continued or texts.get(whole, False)
        texts.move_to_end(whole)
        if len(texts) > VARIANTS:
            texts.popitem(last=False)
        num_continued = sum(went_on for text, went_on in texts.items() if text != whole)
        if num_continued >= (1 if texts[whole] else 2):
            return AdviceCode.PER_SESSION_HEADER
        if not is_new or any(texts.values()) or len(texts) < MIN_VARIANTS:
            return None
        named = _HEADER.match(str(chat.messages[0]["content"] or "")[:200])
        return AdviceCode.PER_SESSION_HEADER if named else AdviceCode.VOLATILE_PREFIX

    def _alternates(self, prompt: PromptDigests, memory: TenantMemory, scope: int, first: int) -> bool:
        """Whether a conversation, identified by its first two messages, alternates between two system prompts."""
        if len(prompt) < first + 2 or sum(prompt.num_chars[first : first + 2]) < MIN_SHARED_CHARS:
            return False
        key = self._digester.digest(scope, *prompt.whole[first : first + 2])
        turns = memory.turns.find(key) or []
        system = SystemPrompt(prompt.whole[0], prompt.loose[0])
        if turns[-1:] != [system]:
            turns = [*turns[1 - VARIANTS :], system]
        memory.turns.put(key, turns)
        if len(turns) < 4:
            return False
        one, other = turns[-2:]
        return turns[-4:] == [one, other, one, other] and one.loose != other.loose


def _closest(others: list[PromptDigests], prompt: PromptDigests) -> tuple[PromptDigests | None, int]:
    """Return the prompt with the longest common prefix of messages (the newest of several), and its length."""
    closest: PromptDigests | None = None
    most = 0
    for other in others:
        num = next(
            (i for i, (a, b) in enumerate(zip(other.whole, prompt.whole, strict=False)) if a != b),
            min(len(other), len(prompt)),
        )
        if num >= most:
            closest, most = other, num
    return closest, most


def _shares_rest(old: PromptDigests, new: PromptDigests, at: int, first_user: int) -> bool:
    """Whether what follows a message is the same in two prompts, and enough to be one conversation."""
    num = num_chars = 0
    for index in range(at + 1, min(len(old), len(new))):
        if old.whole[index] != new.whole[index]:
            break
        num += 1
        num_chars += new.num_chars[index]
    return num_chars >= MIN_SHARED_CHARS and num >= (2 if at == first_user else 1)
