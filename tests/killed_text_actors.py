"""A tokenizer and a detokenizer that are killed as planned, at any point in the handling of a message or request."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import attrs

from quipu.actors.detokenizer.actor import Detokenizer
from quipu.actors.detokenizer.delivery import Delivery
from quipu.actors.detokenizer.logprob_assembler import LogprobAssembler, PromptAssembler
from quipu.actors.detokenizer.prompt_vector import PromptVector
from quipu.actors.detokenizer.text_store import PendingTexts
from quipu.actors.detokenizer.tracked_sequence import SequenceMaker, TrackedSequence
from quipu.actors.messages.detokenizer import Track
from quipu.actors.messages.tokenizer import CountTokens
from quipu.actors.tokenizer.actor import TokenizerActor
from tests.crash_scenario import PlannedCrash

MAIN_POINTS = {
    "detokenizer": ["before", "in the stream"],
    "tokenizer": ["before"],
}
"""Points in the handling of a message or request that every run of the tests uses with many requests."""
OTHER_POINTS = {
    "detokenizer": [
        "prompt made", "in the logprobs", "token given", "before completed", "completed", "prompt scored", "forgotten",
        "handled",
    ],
    "tokenizer": [
        "entered", "encoded", "counted", "sampled", "hashed", "before posted", "posted", "submitted", "second submit",
        "handled",
    ],
}  # fmt: skip


@attrs.define
class KillPlan:
    """Kill at `point`, once for each message or request."""

    point: str | None = None
    num_messages: int = 0
    num_kills: int = 0
    held_slots: set[int] = attrs.field(factory=set)
    """Places in queues that were taken and not left."""
    _last: object = None
    _done: dict[Hashable, object] = attrs.field(factory=dict)

    def note(self, pending: object) -> None:
        if pending is not self._last:
            self._last = pending
            self.num_messages += 1

    def kill_if_due(self, point: str, key: Hashable = None) -> None:
        """Raise at the planned point. `key`: which message or request is handled, by default the last one noted."""
        key = self.num_messages if key is None else key
        if point == self.point and key not in self._done:
            self._done[key] = True
            self.num_kills += 1
            raise PlannedCrash(f"{key}, {point}")


# ---------------------------------------------------------------- a detokenizer that is killed


class KilledDelivery(Delivery):
    plan: KillPlan

    def give(self, *arguments: Any) -> None:
        super().give(*arguments)
        self.plan.kill_if_due("token given")

    def complete(self, sequence: TrackedSequence) -> None:
        self.plan.kill_if_due("before completed")
        super().complete(sequence)
        self.plan.kill_if_due("completed")

    def add_payloads(self, steps: Any) -> None:
        super().add_payloads(steps)
        self.plan.kill_if_due("prompt scored")

    def catch_up(self, sequence: TrackedSequence) -> None:
        super().catch_up(sequence)
        self.plan.kill_if_due("caught up")

    def forget(self, sequence_id: int) -> None:
        super().forget(sequence_id)
        self.plan.kill_if_due("forgotten")


class TornStream:
    """A stream that raises after it has taken a token: nobody may use it again."""

    def __init__(self, stream: Any, plan: KillPlan) -> None:
        self._stream = stream
        self._plan = plan
        self._is_torn = False

    @property
    def num_reasoning_tokens(self) -> int:
        return int(self._stream.num_reasoning_tokens)

    def _after(self, piece: Any) -> Any:
        assert not self._is_torn
        self._is_torn = True
        self._plan.kill_if_due("in the stream")
        self._is_torn = False
        return piece

    def push(self, token_id: int) -> Any:
        return self._after(self._stream.push(token_id))

    def push_hidden(self, token_id: int) -> Any:
        return self._after(self._stream.push_hidden(token_id))

    def flush(self) -> Any:
        return self._after(self._stream.flush())


class TornLogprobs(LogprobAssembler):
    plan: KillPlan

    def next_token(self, *arguments: Any) -> Any:
        token = super().next_token(*arguments)
        self.plan.kill_if_due("in the logprobs")
        return token


class TearingMaker(SequenceMaker):
    plan: KillPlan

    def stream(self, *arguments: Any) -> Any:
        return TornStream(super().stream(*arguments), self.plan)

    def logprobs(self, *arguments: Any) -> Any:
        found: Any = super().logprobs(*arguments)
        if found is not None:
            found.__class__ = TornLogprobs
            found.plan = self.plan
        return found


class KilledDetokenizer(Detokenizer):
    def __init__(self, store: Any, decoder: Any, accountant: Any, end: Any, template: Any, *, plan: KillPlan) -> None:
        super().__init__(store, decoder, accountant, end, template)
        self.plan = plan
        self._delivery = KilledDelivery(store, accountant, end)
        self._delivery.plan = plan
        self._maker = TearingMaker(decoder, template)
        self._maker.plan = plan

    async def _handle(self, pending: PendingTexts) -> None:
        self.plan.note(pending)
        self.plan.kill_if_due("before")
        await super()._handle(pending)
        self.plan.kill_if_due("handled")

    def _handle_now(self, pending: PendingTexts) -> bool:
        self.plan.note(pending)
        self.plan.kill_if_due("before")
        is_handled = super()._handle_now(pending)
        if is_handled:
            self.plan.kill_if_due("handled")
        return is_handled

    def _prompt_of(self, message: Track) -> PromptAssembler | PromptVector | None:
        prompt = super()._prompt_of(message)
        self.plan.kill_if_due("prompt made")
        return prompt


# ---------------------------------------------------------------- a tokenizer that is killed


@attrs.frozen
class WatchedSlot:
    """A request's place in a queue; it must be left in the end."""

    _slot: Any
    _held: set[int]

    def leave(self) -> None:
        self._held.discard(id(self._slot))
        self._slot.leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slot, name)


@attrs.frozen
class KilledEncoder:
    _encoder: Any
    _plan: KillPlan
    _seen: list[object] = attrs.field(factory=list)

    def enter(self, tenant: str, num_bytes: int) -> WatchedSlot:
        slot = self._encoder.enter(tenant, num_bytes)
        self._seen.append(slot)
        self._plan.held_slots.add(id(slot))
        return WatchedSlot(slot, self._plan.held_slots)

    async def encode(self, prompt: Any, *arguments: Any) -> Any:
        encoded = await self._encoder.encode(prompt, *arguments)
        self._kill("encoded", prompt)
        return encoded

    async def count(self, prompt: Any, *arguments: Any) -> Any:
        counted = await self._encoder.count(prompt, *arguments)
        self._kill("counted", prompt)
        return counted

    def _kill(self, point: str, prompt: Any) -> None:
        self._seen.append(prompt)  # so that no other gets its id
        self._plan.kill_if_due(point, id(prompt))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)


@attrs.frozen
class KilledPoster:
    _poster: Any
    _plan: KillPlan

    def post(self, message: Any) -> None:
        self._plan.kill_if_due("before posted", message.request_id)
        self._poster.post(message)
        self._plan.kill_if_due("posted", message.request_id)


@attrs.frozen
class KilledDesk:
    _desk: Any
    _plan: KillPlan

    async def submit(self, submit: Any, track: Track, opened: Any) -> bool:
        if track.index:
            self._plan.kill_if_due("second submit", track.request_id)
        return bool(await self._desk.submit(submit, track, opened))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._desk, name)


class KilledTokenizer(TokenizerActor):
    def __init__(self, *arguments: Any, plan: KillPlan) -> None:
        super().__init__(*arguments)
        self.plan = plan
        self._encoder = KilledEncoder(self._encoder, plan)
        self._accountant = KilledPoster(self._accountant, plan)
        self._desk: Any = KilledDesk(self._desk, plan)

    async def _handle(self, first: Any) -> None:
        key = id(first.outlet) if isinstance(first, CountTokens) else getattr(first, "request_id", None)
        self.plan.note(first)
        self.plan.kill_if_due("before", key)
        await super()._handle(first)
        self.plan.kill_if_due("handled", key)

    def _enter(self, job: Any) -> Any:
        slot = super()._enter(job)
        self.plan.kill_if_due("entered", job.request_id)
        return slot

    async def _encode(self, job: Any, slot: Any) -> Any:
        refusal = await super()._encode(job, slot)
        self.plan.kill_if_due("sampled", job.request_id)
        return refusal

    async def _keys(self, root: bytes, prompt: Any) -> list[bytes]:
        keys = await super()._keys(root, prompt)
        self.plan.kill_if_due("hashed", root)
        return keys

    async def _submit(self, job: Any, sampling: Any) -> None:
        await super()._submit(job, sampling)
        self.plan.kill_if_due("submitted", job.request_id)


def killing(actor: str, plan: KillPlan) -> dict[str, Callable[..., Any]]:
    """Return the options of a runtime in which one actor is killed."""
    if actor == "tokenizer":
        return {"make_tokenizer": partial(KilledTokenizer, plan=plan)}
    return {"make_detokenizer": partial(KilledDetokenizer, plan=plan)}
