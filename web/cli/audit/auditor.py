"""What all checks share: how prompts are measured, drawn and sent, and how often a check is tried."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs

from .asker import Asker
from .drawn_prompts import Prompt, draw_prompt
from .exchange import Ask, Exchange
from .verdicts import ENOUGH, Finding, Trial, settle

MAX_PROMPT_TOKENS = 20_000
SLACK = 16
"""Tokens by which counts of equal prompts may differ: generated ones, and joints of tokens at the end of a prefix."""
_MAX_UNITS = MAX_PROMPT_TOKENS
"""Of a part of a prompt, so that numbers keep five digits."""


@attrs.define
class Scale:
    """How many tokens prompts have, as the server counts them."""

    per_unit: float = 8.0
    """Of a number and a word, as text."""
    per_tail_unit: float = 6.0
    bare: dict[str, int] = attrs.field(factory=dict)
    """By API, the tokens of a prompt that is nearly empty: the chat template's, and what a gateway adds."""
    takes_ids: bool = False

    def units(self, api: str, tokens: int) -> int:
        return min(_MAX_UNITS, max(2, round(tokens / (1.0 if self.is_ids(api) else self.per_unit))))

    def tail_units(self, api: str, tokens: int) -> int:
        return min(_MAX_UNITS, max(2, round(tokens / (1.0 if self.is_ids(api) else self.per_tail_unit))))

    def is_ids(self, api: str) -> bool:
        return api == "completions" and self.takes_ids

    def estimate(self, ask: Ask) -> int:
        """Return how many tokens a request takes, rather too many than too few."""
        tokens = self.bare.get(ask.api, 64) * 1.0
        for prompt in ask.prompts:
            unit, tail_unit = (1.0, 1.0) if self.is_ids(ask.api) else (self.per_unit, self.per_tail_unit)
            tokens += 24 + prompt.body.num * unit + (prompt.tail.num * tail_unit if prompt.tail is not None else 0)
        choices: int = ask.fields.get("n", 1)
        return round(1.1 * tokens) + choices * max(ask.max_tokens, 16)


@attrs.define(eq=False)
class Auditor:
    asker: Asker
    scale: Scale
    prompt_tokens: int
    """How long prompts are."""
    draw: random.Random
    findings: list[Finding] = attrs.field(factory=list)
    say: Callable[[str], object] = lambda text: None

    def new_prompt(self, api: str, share: float = 1.0) -> Prompt:
        """Return a prompt that nobody has sent, of a share of the usual length."""
        return draw_prompt(self.scale.units(api, round(self.prompt_tokens * share)), self.draw)

    def grown(self, api: str, prompt: Prompt, tokens: int) -> Prompt:
        return prompt.grown(self.scale.units(api, tokens))

    def with_tail(self, api: str, prompt: Prompt, tokens: int) -> Prompt:
        return prompt.with_tail(self.scale.tail_units(api, tokens), self.draw)

    def floor(self, api: str) -> int:
        """Return how much of a new prompt may be cached all the same: a template, which every prompt begins with."""
        return self.scale.bare.get(api, 64) + SLACK

    async def ask(self, api: str, *prompts: Prompt, is_stream: bool = False, **fields: Any) -> Exchange:
        return await self.asker.ask(Ask(api, prompts, is_stream=is_stream, **fields))

    async def asks(self, api: str, prompt: Prompt, times: int, is_stream: bool = False) -> list[Exchange]:
        """Send a prompt several times, one after the other."""
        return [await self.ask(api, prompt, is_stream=is_stream) for _ in range(times)]

    async def check(self, check: str, api: str, attempt: Callable[[], Awaitable[Trial]]) -> None:
        """Try a check, again if it does not hold, and keep its verdict."""
        self.say(f"{api}: {check}")
        trials: list[Trial] = []
        while len(trials) < (ENOUGH if _is_doubted(trials) else 1):
            trials.append(await attempt())
            if self.is_over or trials[-1].is_certain or not trials[-1].is_offered:
                break
        self.findings.append(settle(check, api, None, trials))

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be sent."""
        return self.asker.stopped is not None


def _is_doubted(trials: Sequence[Trial]) -> bool:
    return any(trial.is_held is False for trial in trials)


def unanswered(exchanges: Sequence[Exchange]) -> Trial | None:
    """Return a trial that cannot say anything if a request was not answered or said nothing."""
    for exchange in exchanges:
        if exchange.failure is not None:
            failure = exchange.failure
            reason = f"{failure.kind}: {failure.message}" if failure.message else failure.kind
            return Trial(None, reason, (exchange,), is_offered=not exchange.is_refused)
        if exchange.cached is None:
            return Trial(None, "the server does not say", (exchange,))
    return None
