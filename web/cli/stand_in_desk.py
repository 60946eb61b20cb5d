"""A request desk that answers by itself: for the request that the server sends to itself before it is ready.

`self_check.py` makes an application on it, which runs all of the web layer's code on a request without opening an
account: the prompt is counted by the real tokenizer, if this server has one, and the answer is `ANSWER`.

What must always hold: nothing here reaches an engine, an upstream, the accountant or the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from quipu.actors.cache_insight.cache_watch import CacheWatch
from quipu.actors.config.pooling_config import Task
from quipu.actors.messages.accountant import Caller
from quipu.actors.messages.counts import Known
from quipu.actors.messages.handler import Closed, Delta, KeepAnswer, PromptRead, Started
from quipu.actors.messages.outcomes import FinishReason, Outcome, RequestError
from quipu.actors.messages.prompts import Prompt, TextPrompt, Truncation
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.messages.upstream import Forward
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.adapters import Adapters
from quipu.actors.request_desk.health import EngineStatus, Health
from quipu.actors.request_desk.interface import (
    Desk,
    DeskClosed,
    EngineControl,
    Explain,
    Forwarding,
    PromptLookUp,
    PromptRefused,
    ServingInfo,
)
from quipu.actors.request_desk.open_requests import OpenRequest

ANSWER = ("o", "k")
"""The text of every answer, a token each."""
COUNTED = TextPrompt("Are you ready?")
"""What is tokenized for an answer: a text, since a checkpoint's chat template may refuse whatever it likes."""
MODEL = "self-check"
NOBODY = Caller()


class StandInDesk:
    """Implements `Desk` beside the server's own, whose tokenizer it asks."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.info: ServingInfo = attrs.evolve(
            desk.info,
            task=Task.GENERATE,
            model_names=(MODEL,),
            has_engines=True,
            passed_on={},
            shared=frozenset(),
            adapters={},
        )
        self.upstreams: Forwarding | None = None
        self.num_counted = 0
        self._open: dict[str, OpenRequest] = {}

    @property
    def cache(self) -> CacheWatch:
        return self._desk.cache

    @property
    def adapters(self) -> Adapters:
        return self._desk.adapters

    @property
    def explain(self) -> Explain:
        return lambda request_id, tenant: None

    def new_request_id(self) -> str:
        return self._desk.new_request_id()

    def open(
        self, request: Encode | Forward, endpoint: str, caller: Caller = NOBODY, keep: KeepAnswer | None = None, /
    ) -> OpenRequest:
        if isinstance(request, Forward):
            raise DeskClosed("This request is not passed on.")
        opened = self._open[request.request_id] = OpenRequest(request.request_id, self, request)
        return opened

    async def encode(self, opened: OpenRequest, /) -> None:
        """Answer a request as soon as it starts."""
        mailbox, request_id = opened.mailbox, opened.request_id
        opened.mark_encoded()
        try:
            self.num_counted = num_tokens = await self.count_tokens(COUNTED, "messages")
        except PromptRefused as refused:
            self.fail(request_id, refused.error)
            return
        mailbox.put(Started(num_tokens, 0, 0))
        for text in ANSWER:
            mailbox.put(Delta(0, text, 1, None))
        mailbox.put(Delta(0, "", 0, FinishReason.STOP))
        record = UsageRecord(
            request_id=request_id,
            outcome=Outcome.FINISHED,
            prompt=Known(num_tokens),
            cached=Known(0),
            cache_write=Known(0),
            completion_tokens=len(ANSWER),
        )
        mailbox.put(Closed(record, None))

    def fail(self, request_id: str, error: RequestError) -> None:
        record = UsageRecord(request_id=request_id, outcome=Outcome.FAILED)
        self._open[request_id].mailbox.put(Closed(record, error))

    def leave(self, request_id: str) -> None:
        if (opened := self._open.pop(request_id, None)) is not None:
            opened.mark_encoded()
            if opened.mailbox.closed is None:
                opened.mailbox.put(Closed(UsageRecord(request_id=request_id, outcome=Outcome.CANCELLED), None))

    async def count_tokens(self, prompt: Prompt, prompt_param: str, tenant: str = "", /) -> int:
        if not self._desk.info.has_engines:
            return len(ANSWER)  # nothing is tokenized here
        return await self._desk.count_tokens(prompt, prompt_param, tenant)

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
        raise DeskClosed("No prompt is shown to this request.")

    @property
    def num_open_requests(self) -> int:
        return len(self._open)

    async def look_up(self, request: Encode, /, *, prefetch: bool = False) -> Sequence[PromptLookUp]:
        raise DeskClosed("Nothing is looked up for this request.")

    def health(self) -> Health:
        return self._desk.health()

    def engines(self) -> Sequence[EngineStatus]:
        return ()

    def reset_prefix_cache(self) -> None:
        raise DeskClosed("This request changes nothing.")

    @property
    def control(self) -> EngineControl:
        raise DeskClosed("This request changes nothing.")

    def render_metrics(self) -> bytes:
        return b""
