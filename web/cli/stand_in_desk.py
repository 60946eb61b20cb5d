"""A request desk that answers by itself: for the request that the server sends to itself before it is ready.

`self_check.py` makes an application on it, which runs all of the web layer's code on a request without opening an
account: the prompt is counted by the real tokenizer, if this server has one, and the answer is `ANSWER`.

What must always hold: nothing here reaches an engine, an upstream, the accountant or the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from quipu.actors.cache_insight.cache_figures import CacheView
from quipu.actors.messages.accountant import Caller
from quipu.actors.messages.counts import Known
from quipu.actors.messages.handler import Closed, Delta, Started
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.actors.messages.prompts import Prompt, TextPrompt
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.messages.upstream import Forward, ForwardOutlet
from quipu.actors.messages.usage_record import UsageRecord
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
from quipu.actors.request_desk.mailbox import Mailbox

ANSWER = ("o", "k")
"""The text of every answer, a token each."""
COUNTED = TextPrompt("Are you ready?")
"""What is tokenized for an answer: a text, since a checkpoint's chat template may refuse whatever it likes."""
MODEL = "self-check"
NOBODY = Caller()


class StandInTicket:
    """A request that is answered as soon as it starts."""

    dropped: tuple[str, ...] = ()

    def __init__(self, desk: StandInDesk, request: Encode) -> None:
        self.mailbox = Mailbox()
        self._desk = desk
        self._request = request

    @property
    def request_id(self) -> str:
        return self._request.request_id

    async def start(self) -> None:
        try:
            num_tokens = await self._desk.count_tokens(COUNTED, self._request.prompt_param)
        except PromptRefused as refused:
            self._end(UsageRecord(request_id=self.request_id, outcome=Outcome.FAILED), refused.error)
            return
        self._desk.num_counted = num_tokens
        self.mailbox.put(Started(num_tokens, 0, 0))
        for text in ANSWER:
            self.mailbox.put(Delta(0, text, 1, None))
        self.mailbox.put(Delta(0, "", 0, FinishReason.STOP))
        record = UsageRecord(
            request_id=self.request_id,
            outcome=Outcome.FINISHED,
            prompt=Known(num_tokens),
            cached=Known(0),
            cache_write=Known(0),
            completion_tokens=len(ANSWER),
        )
        self._end(record)

    async def pass_on(self, outlet: ForwardOutlet) -> None:
        raise DeskClosed("This request is not passed on.")

    def when_encoded(self, call: Callable[[], object], /) -> None:
        call()

    def expire(self, after_s: float) -> None:
        error = RequestError(ErrorKind.TIMEOUT, f"longer than {after_s:g} seconds")
        self._end(UsageRecord(request_id=self.request_id, outcome=Outcome.FAILED), error)

    def leave(self) -> None:
        if self.mailbox.closed is None:
            self._end(UsageRecord(request_id=self.request_id, outcome=Outcome.CANCELLED))

    def _end(self, record: UsageRecord, error: RequestError | None = None) -> None:
        self.mailbox.put(Closed(record, error))


class StandInDesk:
    """Implements `Desk` beside the server's own, whose tokenizer it asks."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.info: ServingInfo = attrs.evolve(
            desk.info, model_names=(MODEL,), has_engines=True, passed_on={}, shared=frozenset()
        )
        self.upstreams: Forwarding | None = None
        self.num_counted = 0
        """The prompt tokens of the last answer."""

    @property
    def cache(self) -> CacheView:
        return self._desk.cache

    @property
    def explain(self) -> Explain:
        return lambda request_id, tenant: None

    def new_request_id(self) -> str:
        return self._desk.new_request_id()

    def open(self, request: Encode | Forward, endpoint: str, caller: Caller = NOBODY, /) -> StandInTicket:
        if isinstance(request, Forward):
            raise DeskClosed("This request is not passed on.")
        return StandInTicket(self, request)

    async def count_tokens(self, prompt: Prompt, prompt_param: str, tenant: str = "", /) -> int:
        if not self._desk.info.has_engines:
            return len(ANSWER)  # nothing is tokenized here
        return await self._desk.count_tokens(prompt, prompt_param, tenant)

    async def look_up(self, request: Encode, /) -> Sequence[PromptLookUp]:
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
