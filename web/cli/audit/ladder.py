"""The requests that most checks are judged by: a new prompt, thrice, a longer one, and one that goes on differently.

Whatever the tokenizer, the common prefix of two prompts is no longer than the shorter of them. So the tokens that the
server counted for the first bound what may be cached of the others, without knowing its tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import attrs

from .auditor import SLACK, Auditor, unanswered
from .exchange import Exchange
from .verdicts import Trial

_GROWTH, _TAIL = 0.4, 0.6
"""By what share of the prompt it grows, and how long a tail is."""
_FEWEST_MORE = 4 * SLACK
"""Tokens by which a prompt grows at least, as estimated: with half as many it would count as no longer."""
_NUM_STEPS, _STEP_TOKENS = 7, (9, 40)


@attrs.frozen
class Rungs:
    cold: Exchange
    warm: Exchange
    again: Exchange
    grown: Exchange
    """The same prompt with more at its end."""
    branched: Exchange
    """The same prompt, with a long tail of few characters a token."""

    def all(self) -> tuple[Exchange, ...]:
        return (self.cold, self.warm, self.again, self.grown, self.branched)

    @property
    def warms(self) -> tuple[Exchange, ...]:
        return (self.warm, self.again)


async def climb(auditor: Auditor, api: str, is_stream: bool, share: float = 1.0) -> Rungs:
    """Send the requests of one new prompt."""
    prompt = auditor.new_prompt(api, share)
    growth, tail = (max(_FEWEST_MORE, round(auditor.prompt_tokens * share * part)) for part in (_GROWTH, _TAIL))
    cold, warm, again = await auditor.asks(api, prompt, 3, is_stream)
    grown = await auditor.ask(api, auditor.grown(api, prompt, growth), is_stream=is_stream)
    branched = await auditor.ask(api, auditor.with_tail(api, prompt, tail), is_stream=is_stream)
    return Rungs(cold, warm, again, grown, branched)


def judge_cold(rungs: Rungs, floor: int) -> Trial:
    cold = rungs.cold
    if cold.cached is None:
        return Trial(None, "the server does not say", (cold,))
    if cold.cached > floor:
        return Trial(False, f"{cold.cached} of {cold.prompt} tokens of a new prompt are said to be cached", (cold,))
    return Trial(True, f"{cold.cached} of {cold.prompt} tokens", (cold,))


def judge_prefix(rungs: Rungs) -> Trial:
    """Judge the longer prompts by the tokens of the one that they begin with."""
    bound = rungs.cold.prompt
    longer = [exchange for exchange in (rungs.grown, rungs.branched) if exchange.cached is not None]
    if bound is None or not longer:
        return Trial(None, "the server does not say", (rungs.grown,))
    for exchange in longer:
        if (exchange.prompt or 0) < bound + 2 * SLACK:
            return Trial(None, "the longer prompt is not counted as longer", (rungs.cold, exchange))
    most = max(longer, key=lambda exchange: exchange.cached or 0)
    cached = most.cached or 0
    if cached <= bound + SLACK:
        return Trial(True, f"{cached} of at most {bound} tokens", (rungs.cold, most))
    reason = f"{cached} tokens are said to be cached of a prompt that shares at most {bound} with others"
    # One of two alone may have been sent twice, on the way to the server.
    is_shown = (rungs.branched.cached or 0) > bound + SLACK
    return Trial(False if is_shown else None, reason, (rungs.cold, rungs.branched if is_shown else most))


def judge_warm(rungs: Rungs) -> Trial:
    counts = [exchange.cached for exchange in rungs.warms]
    said = [count for count in counts if count is not None]
    if not said:
        return Trial(None, "the server does not say", (rungs.cold, rungs.warm))
    if not any(said):
        reason = "no hit: it does not cache such prompts, not always, or on several replicas"
        return Trial(None, reason, (rungs.cold, rungs.warm))
    often = "" if all(said) else f", {sum(map(bool, said))} times of {len(said)}"
    return Trial(True, f"{max(said)} of {rungs.warm.prompt} tokens{often}", (rungs.cold, rungs.warm))


def judge_total(rungs: Rungs) -> Trial:
    """Judge whether the prompt's tokens depend on how many of them are cached."""
    cold = rungs.cold.prompt
    hits = [exchange for exchange in rungs.warms if exchange.cached]
    if cold is None or not hits or hits[0].prompt is None:
        return Trial(None, "no hit was seen, so nothing can be compared", (rungs.cold, rungs.warm))
    warm, cached = hits[0].prompt, hits[0].cached or 0
    if abs(warm - cold) <= SLACK:
        return Trial(True, f"{cold} tokens new, {warm} cached", (rungs.cold, hits[0]))
    reason = f"{cold} tokens when new, {warm} with {cached} cached"
    if abs(abs(warm - cold) - cached) <= SLACK and cached > 2 * SLACK:
        return Trial(False, reason, (rungs.cold, hits[0]))
    return Trial(None, f"{reason}: something else is in the prompt", (rungs.cold, hits[0]))


def judge_counts(exchanges: Sequence[Exchange]) -> Trial:
    """Judge every usage by itself."""
    seen = False
    for exchange in exchanges:
        for _, said in exchange.usages:
            if said.faults:
                return Trial(False, f"{said.faults[0]}, which is no count of tokens", (exchange,), is_certain=True)
            seen = seen or said.cached is not None
        said = exchange.said
        if said.prompt is not None and (said.cached or 0) > said.prompt:
            reason = f"{said.cached} tokens are said to be cached of a prompt of {said.prompt}"
            return Trial(False, reason, (exchange,), is_certain=True)
    return Trial(True, f"{len(exchanges)} responses") if seen else Trial(None, "the server does not say")


def judge_zero(rungs: Rungs) -> Trial:
    """Judge whether a new prompt lacks a count that it has when it is repeated."""
    cold, hits = rungs.cold, [exchange for exchange in rungs.warms if exchange.cached]
    if cold.cached is not None:
        return Trial(True, f"{cold.cached} is said", (cold,))
    if not hits:
        return Trial(None, "no hit was seen, so nothing is known of what is said without one", (cold,))
    if not cold.usages or len(hits) < len(rungs.warms):
        return Trial(None, "a count is missing", (cold, hits[0]))
    reason = f"no count with a new prompt, {hits[0].cached} with a repeated one: 0 and unknown look the same"
    return Trial(False, reason, (cold, hits[0]))


def judge_once(streams: Sequence[Exchange]) -> Trial:
    """Judge how often a stream says its usage. A server that says a running count says it with every output."""
    whole = [exchange for exchange in streams if exchange.is_answered and exchange.usages]
    if not whole:
        return Trial(None, "no stream had a usage")
    for exchange in whole:
        said = [usage for _, usage in exchange.usages]
        if exchange.ask.api == "messages":
            if (trial := _judge_message_events(exchange)) is not None:
                return trial
        elif exchange.num_bare_outputs and len(said) > 1 and said[-2] == said[-1]:
            reason = f"{len(said)} events have the usage: who adds them up counts the prompt {len(said)} times"
            return Trial(False, reason, (exchange,), is_certain=True)
    num = max(len(exchange.usages) for exchange in whole)
    return Trial(True, "once" if num == 1 else f"in {num} events that agree", (whole[0],))


def _judge_message_events(exchange: Exchange) -> Trial | None:
    """Judge whether the first and the last event of a message disagree about what was cached."""
    said = [usage for _, usage in exchange.usages if usage.cached is not None and usage.prompt]
    first, last = said[0] if said else None, said[-1] if said else None
    if first is None or last is None or (first.cached, first.prompt) == (last.cached, last.prompt):
        return None
    begin, end = (f"{usage.cached} of {usage.prompt} tokens cached" for usage in (first, last))
    return Trial(False, f"the stream begins with {begin} and ends with {end}", (exchange,), is_certain=True)


async def grow(auditor: Auditor, api: str) -> Trial:
    """Send a prompt that grows by a few tokens each time, and infer the size of a block."""
    prompt = auditor.new_prompt(api, 0.5)
    steps = [await auditor.ask(api, prompt)]
    for _ in range(_NUM_STEPS):
        prompt = auditor.grown(api, prompt, auditor.draw.randint(*_STEP_TOKENS))
        steps.append(await auditor.ask(api, prompt))
    return unanswered(steps) or judge_blocks(steps, auditor.floor(api))


def judge_blocks(steps: Sequence[Exchange], floor: int) -> Trial:
    """Judge prompts each of which begins with the one before it.

    The size of a block divides every hit. Pages of one token leave out no more than the end of a chat template.
    """
    pairs = list(pairwise(steps))
    for shorter, longer in pairs:
        if (longer.cached or 0) > (shorter.prompt or 0) + SLACK:
            reason = f"{longer.cached} tokens are said to be cached, {shorter.prompt} are shared"
            return Trial(False, reason, (shorter, longer))
    hits = [(shorter, longer) for shorter, longer in pairs if longer.cached]
    counts = {longer.cached or 0 for _, longer in hits}
    if len(counts) < 2:
        return Trial(None, f"{len(counts)} different hits are too few", steps[-2:])
    size, shown = math.gcd(*counts), hits[-1]
    if size > 1:
        return Trial(True, f"blocks of {size} tokens, or a divisor of that", shown)
    if all((shorter.prompt or 0) - (longer.cached or 0) <= floor for shorter, longer in hits):
        return Trial(True, "single tokens", shown)
    return Trial(None, "doubtful: neither whole blocks nor all that could be cached", shown)
