"""Questions about prompts that are not to be served: which tokens they have, how many, and what of them is cached.

Used by `desk.py`. The tokenizer reads the prompts (`CountTokens`, `ReadPrompt`, `KeyPrompt`), engines look into their
caches (`lookups.py`). Neither opens an account.

What must always hold: when the asker leaves, so does its question; a question counts as an open request.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ..channel import Sender
from ..messages.handler import Counted, Keyed, PromptRead
from ..messages.outcomes import RequestError
from ..messages.prompts import ChatPrompt, Prompt
from ..messages.tokenizer import CountTokens, Encode, KeyPrompt, PromptQuestion, ReadPrompt
from .interface import PromptLookUp, PromptRefused
from .lookups import Lookups
from .open_requests import OpenRequest, PromptSlot


class PromptQuestions:
    def __init__(
        self, encoder: Sender[OpenRequest | PromptQuestion], lookups: Lookups, check_room: Callable[[], None]
    ) -> None:
        """`check_room` raises DeskClosed if nothing more may be asked now."""
        self._encoder = encoder
        self._lookups = lookups
        self._check_room = check_room
        self.num_open = 0

    async def count_tokens(self, prompt: Prompt, prompt_param: str, tenant: str) -> int:
        self._check_room()
        self.num_open += 1
        try:
            counted = await self._ask(lambda slot: CountTokens(prompt, prompt_param, slot, tenant))
        finally:
            self.num_open -= 1
        assert isinstance(counted, Counted)
        return counted.num_tokens

    async def read_prompt(self, question: Callable[[PromptSlot], ReadPrompt]) -> PromptRead:
        self._check_room()
        self.num_open += 1
        try:
            read = await self._ask(question)
        finally:
            self.num_open -= 1
        assert isinstance(read, PromptRead)
        return read

    async def look_up(self, request: Encode, *, prefetch: bool) -> list[PromptLookUp]:
        self._check_room()
        self.num_open += 1
        try:
            return [await self._look_up(attrs.evolve(request, prompts=(p,)), prefetch) for p in request.prompts]
        finally:
            self.num_open -= 1

    async def _look_up(self, request: Encode, prefetch: bool) -> PromptLookUp:
        """Look up the only prompt of `request`."""
        (prompt,) = request.prompts
        if isinstance(prompt, ChatPrompt):
            request = attrs.evolve(request, prompts=(attrs.evolve(prompt, locates_parts=True),))
        keyed = await self._ask(lambda slot: KeyPrompt(request, slot))
        assert isinstance(keyed, Keyed)
        looked_up = await self._lookups.ask(keyed, request.affinity, prefetch=prefetch)
        if isinstance(looked_up, RequestError):
            raise PromptRefused(looked_up)
        found = attrs.asdict(looked_up, recurse=False)
        return PromptLookUp(**found, num_prompt_tokens=len(keyed.token_ids), spans=keyed.spans)

    async def _ask(self, question: Callable[[PromptSlot], PromptQuestion]) -> Counted | PromptRead | Keyed:
        """Return the tokenizer's answer. Raises PromptRefused."""
        slot = PromptSlot()
        try:
            await self._encoder.send(question(slot))
            answer = await slot.wait()
        finally:
            slot.leave()
        if isinstance(answer, RequestError):
            raise PromptRefused(answer)
        return answer
