"""The clients of a simulation: each asks for one thing, reads what comes, and leaves when it wants to.

What it has seen goes into `Seen` as plain data.
"""

from __future__ import annotations

from typing import Any

import attrs
import trio

from quipu.actors.ledger.durable_journal import DurableJournal
from quipu.actors.messages.accountant import Caller
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from quipu.actors.messages.handler import Closed, Delta, ScoredDelta, Started
from quipu.actors.messages.output import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    Markup,
    OutputEvent,
    OutputRules,
    ReasoningDelta,
    TextDelta,
)
from quipu.actors.messages.prompts import CacheTtl, ChatPrompt, ContentMark, Prompt, TextPrompt, TokenPrompt
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scores import ScoredToken
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.interface import DeskClosed
from quipu.actors.wiring import Runtime
from quipu.kernels.step_types import SequenceKind
from tests.simulation.arrival import STEP_S, Arrival
from tests.simulation.expected import Scored, role_of, tool_definition
from tests.simulation.memory_ledger import MemoryStorage
from tests.simulation.seen import End, Numbers, Part, Piece, Seen, Watched
from tests.simulation.tap import Tap

TIERS = ("device", "host", "disk", "remote")


@attrs.define(eq=False)
class Clients:
    _runtime: Runtime
    _journal: DurableJournal
    _storage: MemoryStorage
    _tap: Tap
    _seen: Seen
    _began: float
    _ended: dict[int, trio.Event] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self._ended = {arrival.number: trio.Event() for arrival in self._seen.plan.all_arrivals}

    def _now(self) -> float:
        return trio.current_time() - self._began

    async def ask(self, arrival: Arrival) -> None:
        if arrival.follows is None:
            await trio.sleep_until(self._began + arrival.at_s)
        else:
            await self._ended[arrival.follows].wait()
            await trio.sleep(10 * STEP_S + arrival.at_s)
        if arrival.after_reset:
            self._seen.resets.append(self._now())
            self._runtime.desk.reset_prefix_cache()
            await trio.sleep(STEP_S)
        watched = self._seen.watched[arrival.number] = Watched(self._now())
        try:
            await self._ask_now(arrival, watched)
        finally:
            self._ended[arrival.number].set()

    async def _ask_now(self, arrival: Arrival, watched: Watched) -> None:
        try:
            ticket = self._runtime.desk.open(self._encode(arrival), "simulation", self._caller(arrival))
        except DeskClosed as error:
            watched.refused, watched.ended_at = str(error), self._now()
            return
        leaving = trio.CancelScope()
        if arrival.leaves_after_s is not None:
            leaving.deadline = trio.current_time() + arrival.leaves_after_s
        try:
            with leaving:
                async with trio.open_nursery() as nursery:
                    if arrival.deadline_s is not None:
                        nursery.start_soon(_expire, ticket, arrival.deadline_s)
                    await ticket.start()
                    await self._read(ticket, arrival, watched)
                    nursery.cancel_scope.cancel()
        finally:
            ticket.leave()
        watched.ended_at = self._now()
        if not watched.ends:
            watched.left_at = watched.ended_at

    async def _read(self, ticket: Any, arrival: Arrival, watched: Watched) -> None:
        while True:
            for event in await ticket.mailbox.get():
                now = self._now()
                match event:
                    case Started():
                        watched.events.append(
                            Numbers(
                                now,
                                event.prompt_tokens,
                                event.cached_tokens,
                                event.cache_write_tokens,
                                event.created_5m_tokens,
                                event.created_1h_tokens,
                            )
                        )
                    case Delta():
                        watched.events.append(_piece(now, event))
                    case Closed():
                        told = _told(event.record)
                        error = None if event.error is None else (event.error.kind.value, event.error.message)
                        watched.events.append(End(now, told, error, event.is_final))
                        if event.is_final:
                            watched.was_safe = self._is_written(arrival.request_id, told)
                        self._tap.note(arrival.request_id, list(map(str, watched.events)))
                        return
            await trio.sleep(arrival.read_pause_s)

    def _caller(self, arrival: Arrival) -> Caller:
        digest = self._seen.adapters.get(arrival.adapter)
        return Caller(
            tenant=arrival.tenant,
            client_request_id=f"client-{arrival.number}",
            model=arrival.adapter or "demo",
            adapter=digest,
            parent=None if digest is None else "demo",
            idempotency_key=arrival.idempotency_key or None,
            idempotency_digest=f"{arrival.tenant} {arrival.idempotency_key}" if arrival.idempotency_key else None,
        )

    def _encode(self, arrival: Arrival) -> Encode:
        return Encode(
            request_id=arrival.request_id,
            prompts=(_prompt(arrival), *map(TokenPrompt, arrival.further)),
            kind=SequenceKind.EMBED if arrival.is_embedded else SequenceKind.GENERATE,
            num_choices=arrival.num_choices,
            max_tokens=arrival.max_tokens,
            sampling=SamplingParams(
                max_tokens=1,
                temperature=arrival.temperature,
                seed=arrival.seed,
                stop_token_ids=arrival.stop_token_ids,
                ignore_eos=arrival.ignores_eos,
                logprobs=arrival.logprobs,
                prompt_logprobs=arrival.prompt_logprobs,
            ),
            stop=arrival.stop,
            include_stop=arrival.include_stop,
            skip_special_tokens=True,
            domain=arrival.tenant,
            prompt_param="prompt",
            max_tokens_param="max_tokens",
            priority=arrival.priority,
            is_batch=arrival.is_batch,
            cache_salt=arrival.salt,
            adapter=self._seen.adapters.get(arrival.adapter, ""),
            with_token_ids=arrival.with_token_ids,
            grammar=GrammarSpec(GrammarKind.LARK, arrival.grammar_text, "grammar") if arrival.grammar else None,
            output=OutputRules({name: {} for name in arrival.tools}, arrival.max_calls) if arrival.is_read else None,
            thinking_budget=arrival.thinking_budget,
        )

    def _is_written(self, request_id: str, told: dict[str, Any]) -> bool:
        """Return whether the closing record of a request is where a crash cannot lose it.

        Of those that were never admitted a bounded number is written, later where the disk is full.
        """
        is_full = self._journal.trouble is not None
        if told["outcome"] == "rejected" or (told["prompt_tokens"] is None and is_full):
            return True
        wanted = f'"request_id":"{request_id}"'.encode()
        lines = self._storage.surviving(synced=self._seen.plan.setup.fsync).split(b"\n")
        return any(wanted in line and b'"kind":"closed"' in line for line in lines)


def _prompt(arrival: Arrival) -> Prompt:
    if arrival.text is not None:
        return TextPrompt(arrival.text)
    if not arrival.chat:
        return TokenPrompt(arrival.prompt)
    messages = tuple({"role": role_of(i), "content": content} for i, content in enumerate(arrival.chat))
    ttls = {False: CacheTtl.FIVE_MINUTES, True: CacheTtl.ONE_HOUR}
    return ChatPrompt(
        messages,
        tools=tuple(map(tool_definition, arrival.tools)) if arrival.shows_tools else (),
        marks=tuple(ContentMark(ttls[mark.is_long], mark.message, mark.num_chars) for mark in arrival.marks),
    )


def _scored(token: ScoredToken) -> Scored:
    assert token.logprob is not None and token.rank is not None
    return Scored(token.token_id, token.logprob, token.rank, tuple(likely.token_id for likely in token.top))


def _part(event: OutputEvent) -> Part:
    match event:
        case TextDelta():
            return Part("text", event.text)
        case ReasoningDelta():
            return Part("reasoning", event.text)
        case Markup():
            return Part("markup", event.source)
        case CallBegin():
            return Part("call", event.name, event.index)
        case ArgumentsDelta():
            return Part("arguments", event.text, event.index)
        case CallEnd():
            return Part("end", "", event.index)


def _piece(now: float, event: Delta) -> Piece:
    reason = None if event.finish_reason is None else event.finish_reason.value
    scores: tuple[Scored, ...] = ()
    of_prompt: tuple[Scored, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    if isinstance(event, ScoredDelta):
        scores = tuple(map(_scored, event.scores))
        if event.of_prompt is not None and event.of_prompt.scores is not None:
            found = event.of_prompt.scores
            of_prompt = tuple(map(_scored, found.tokens(0, len(found), 1)))
        if event.of_prompt is not None and event.of_prompt.token_ids is not None:
            prompt_ids = tuple(event.of_prompt.token_ids)
    vector = event.of_prompt.vector if isinstance(event, ScoredDelta) and event.of_prompt is not None else None
    return Piece(
        now,
        event.index,
        event.text + "".join(one.source for one in event.events),
        event.num_tokens,
        reason,
        event.stop_match,
        event.token_ids,
        event.stop_token_id,
        scores,
        of_prompt,
        prompt_ids,
        (*((Part("text", event.text),) if event.text else ()), *map(_part, event.events)),
        vector,
        event.num_reasoning_tokens,
    )


def _told(record: UsageRecord) -> dict[str, Any]:
    by_tier = record.cached_by_tier
    return {
        "outcome": record.outcome.value,
        "finish_reason": None if record.finish_reason is None else record.finish_reason.value,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "cache_write_tokens": record.cache_write_tokens,
        **{f"cached_{tier}_tokens": None if by_tier is None else by_tier[tier] for tier in TIERS},
        "completion_tokens": record.completion_tokens,
        "created_5m_tokens": record.created_5m_tokens,
        "created_1h_tokens": record.created_1h_tokens,
        "draft_tokens": record.draft_tokens,
        "accepted_draft_tokens": record.accepted_draft_tokens,
        "reasoning_tokens": record.reasoning_tokens,
    }


async def _expire(ticket: Any, after_s: float) -> None:
    await trio.sleep(after_s)
    ticket.expire(after_s)
