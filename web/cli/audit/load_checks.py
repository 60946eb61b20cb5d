"""Counts while requests run in parallel, after a client has left, after a refusal, and once the cache is full."""

from __future__ import annotations

from .auditor import SLACK, Auditor, unanswered
from .exchange import Ask, Exchange
from .verdicts import Trial

_LONG_OUTPUT = 256
_REFUSED_FIELDS = {"temperature": -1}
_TELLING_S = 0.05
_PRESSURE_SHARE = 0.5
"""Of what is left of the budget, for filling the cache."""
_MAX_ROUNDS = 16


async def try_parallel(auditor: Auditor, api: str) -> Trial:
    """Send one new prompt several times at once, and longer ones that begin with it: somebody has to compute it."""
    num = auditor.asker.concurrency
    if num < 2:
        return Trial(None, "with --concurrency 1 nothing runs in parallel", is_offered=False)
    prompt = auditor.new_prompt(api)
    same = await auditor.asker.ask_together([Ask(api, (prompt,))] * num)
    tokens = round(0.4 * auditor.prompt_tokens)
    longer = [Ask(api, (auditor.with_tail(api, prompt, tokens),)) for _ in range(num)]
    branched = await auditor.asker.ask_together(longer)
    if (trial := unanswered([*same, *branched])) is not None:
        return trial
    if (trial := too_much([*same, *branched])) is not None:
        return trial
    bound = max(exchange.prompt or 0 for exchange in same)
    least = min(same, key=lambda exchange: exchange.cached or 0)
    most = max(branched, key=lambda exchange: exchange.cached or 0)
    if (least.cached or 0) > auditor.floor(api):
        reason = f"each of {num} requests with one new prompt says {least.cached} or more of {bound} tokens were cached"
        return Trial(False, reason, (least,))
    if bound and min(exchange.cached or 0 for exchange in branched) > bound + SLACK:
        reason = f"{most.cached} tokens are said to be cached where at most {bound} are shared"
        return Trial(False, reason, (least, most))
    return Trial(True, f"{num} at once: {least.cached} to {most.cached} of {bound} shared tokens", (least, most))


async def try_disconnect(auditor: Auditor, api: str) -> Trial:
    """Leave a stream at its first output, then send its prompt again, and a new one."""
    prompt = auditor.new_prompt(api)
    left = await auditor.ask(api, prompt, is_stream=True, max_tokens=_LONG_OUTPUT, leaves=True)
    if left.failure is not None:
        return Trial(None, f"the stream failed: {left.failure.kind}", (left,))
    again = await auditor.ask(api, prompt)
    new = await auditor.ask(api, auditor.new_prompt(api))
    if (trial := unanswered([again, new]) or too_much([again, new])) is not None:
        return trial
    if (new.cached or 0) > auditor.floor(api):
        return Trial(False, f"{new.cached} of {new.prompt} tokens of a new prompt", (left, new))
    return Trial(True, f"{again.cached} of {again.prompt} tokens of the prompt that was left", (left, again))


async def try_refused(auditor: Auditor, api: str) -> Trial:
    """Send a prompt with a field that has to be refused, then as it should be."""
    prompt = auditor.new_prompt(api)
    refused = await auditor.ask(api, prompt, fields=_REFUSED_FIELDS)
    if not refused.is_refused:
        return Trial(None, "`temperature: -1` was not refused", (refused,), is_offered=refused.failure is not None)
    first = await auditor.ask(api, prompt, is_stream=True)
    if (trial := unanswered([first]) or too_much([first])) is not None:
        return trial
    new = await auditor.ask(api, auditor.new_prompt(api), is_stream=True)
    shown = (refused, first)
    if (first.cached or 0) <= auditor.floor(api):
        return Trial(True, f"{first.cached} of {first.prompt} tokens", shown)
    reason = f"{first.cached} of {first.prompt} tokens of a prompt that was refused before"
    compute_s = new.first_output_s
    if compute_s is not None and compute_s > _TELLING_S and refused.took_s < compute_s / 5:
        took = f"{refused.took_s * 1000:.0f} ms, too short to compute it ({compute_s * 1000:.0f} ms)"
        return Trial(False, f"{reason}, within {took}", shown)
    return Trial(None, f"doubtful: {reason}; perhaps it was computed before it was refused", shown)


async def try_pressure(auditor: Auditor, api: str) -> Trial:
    """Fill the cache with other prompts while long outputs run, then look what is said of the first."""
    asker = auditor.asker
    prompt = auditor.new_prompt(api)
    before = await auditor.asks(api, prompt, 2)
    seen: list[Exchange] = []
    tokens = round(0.4 * auditor.prompt_tokens)
    limit = asker.spent + (asker.budget - asker.spent) * _PRESSURE_SHARE
    for _ in range(_MAX_ROUNDS):
        others = [Ask(api, (auditor.new_prompt(api),), max_tokens=_LONG_OUTPUT) for _ in range(asker.concurrency)]
        branch = Ask(api, (auditor.with_tail(api, prompt, tokens),), max_tokens=_LONG_OUTPUT)
        round_ = [*others[1:], branch] if len(others) > 1 else [*others, branch]
        seen += await asker.ask_together(round_)
        if auditor.is_over or asker.spent > limit:
            break
    after = await auditor.ask(api, prompt)
    if (trial := unanswered([*before, after]) or too_much([*seen, *before, after])) is not None:
        return trial
    bounds = {True: (before[0].prompt or 0) + SLACK, False: auditor.floor(api)}
    counted = [exchange for exchange in seen if exchange.cached is not None]
    above = [one for one in counted if (one.cached or 0) > bounds[one.ask.prompts[0].salt == prompt.salt]]
    if above:
        often = f"in {len(above)} of {len(counted)} requests"
        reason = f"{above[0].cached} of {above[0].prompt} tokens under pressure, {often}"
        # Fewer may have been sent twice, on the way to the server.
        return Trial(False if 2 * len(above) >= len(counted) else None, reason, (above[0],))
    if (after.cached or 0) > (before[1].cached or 0) + SLACK and before[1].cached:
        return Trial(None, f"{before[1].cached} before, {after.cached} after", (before[1], after))
    fate = "evicted" if (after.cached or 0) < (before[1].cached or 0) else "not evicted"
    text = f"{before[1].cached} before, {after.cached} after {len(seen)} others: {fate}"
    return Trial(True, text, (before[1], after))


def too_much(exchanges: list[Exchange]) -> Trial | None:
    """Return a trial that fails for certain if more is said to be cached than a prompt has."""
    for exchange in exchanges:
        if exchange.prompt is not None and (exchange.cached or 0) > exchange.prompt:
            reason = f"{exchange.cached} tokens are said to be cached of a prompt of {exchange.prompt}"
            return Trial(False, reason, (exchange,), is_certain=True)
    return None
