"""Adds outlines and advice to encoded chats (a `PromptEncoder` around another one).

What must always hold: advice takes about a millisecond of the event loop at a time, and an error in it costs the advice
only.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import structlog
import trio

from ..cache_insight.advisor import Advisor
from ..messages.explanations import Advice
from ..messages.outcomes import RequestError
from ..messages.prompts import ChatPrompt, Prompt
from ..messages.tokenizer import Encode
from ..tokenizer.prompt_encoder import EncodedPrompt, EncodingOptions, EncodingSlot, PromptEncoder

log = structlog.get_logger()


class AdvisingEncoder:
    def __init__(self, encoder: PromptEncoder, advisor: Advisor | None) -> None:
        """Without an advisor, nothing is added."""
        self._encoder = encoder
        self._advisor = advisor

    def inline_slot(self) -> EncodingSlot:
        return self._encoder.inline_slot()

    def enter(self, tenant: str, num_bytes: int) -> EncodingSlot:
        return self._encoder.enter(tenant, num_bytes)

    async def encode(
        self, prompt: Prompt, options: EncodingOptions, slot: EncodingSlot, max_model_len: int
    ) -> EncodedPrompt | RequestError:
        if self._advisor is None or not isinstance(prompt, ChatPrompt):
            return await self._encoder.encode(prompt, options, slot, max_model_len)
        encoded = await self._encoder.encode(prompt, attrs.evolve(options, outlines=True), slot, max_model_len)
        if isinstance(encoded, EncodedPrompt):
            return attrs.evolve(encoded, advice=await self._advise(self._advisor, prompt, options))
        return encoded

    async def encode_alone(self, request: Encode, max_model_len: int) -> EncodedPrompt | RequestError:
        return await self._encoder.encode_alone(request, max_model_len)

    async def encode_bad_words(self, words: Sequence[str], slot: EncodingSlot) -> list[tuple[int, ...]]:
        return await self._encoder.encode_bad_words(words, slot)

    async def count(self, prompt: Prompt, options: EncodingOptions, max_model_len: int) -> int | RequestError:
        return await self._encoder.count(prompt, options, max_model_len)

    async def _advise(self, advisor: Advisor, chat: ChatPrompt, options: EncodingOptions) -> tuple[Advice, ...]:
        try:
            for advice in advisor.slices(chat, options.tenant, options.owner or "", options.request_id):
                if advice is not None:
                    return advice
                await trio.lowlevel.checkpoint()
        except Exception:
            log.exception("advice.failed", request_id=options.request_id)
        return ()
