"""Several outputs of one prompt, and several prompts in one request."""

from __future__ import annotations

from .auditor import SLACK, Auditor, unanswered
from .verdicts import Trial

_NUM = 2


async def try_choices(auditor: Auditor, api: str) -> Trial:
    """Ask for two choices of a new prompt, and of a repeated one: the prompt is counted once in either case."""
    prompt = auditor.new_prompt(api)
    fields = {"n": _NUM}
    cold = await auditor.ask(api, prompt, fields=fields)
    single = await auditor.ask(api, prompt)
    both = await auditor.ask(api, prompt, fields=fields)
    if (trial := unanswered([cold, single, both])) is not None:
        return trial
    if both.num_choices < _NUM:
        return Trial(None, "the answer has one choice", (both,), is_offered=False)
    if _is_times(_NUM, both.prompt, single.prompt):
        reason = f"{both.prompt} prompt tokens with n = {_NUM}, {single.prompt} without"
        return Trial(False, reason, (single, both))
    if (cold.cached or 0) > auditor.floor(api):
        return Trial(False, f"{cold.cached} of {cold.prompt} tokens of a new prompt, with n = {_NUM}", (cold,))
    if (both.cached or 0) > (single.prompt or 0) + SLACK:
        return Trial(False, f"{both.cached} cached with n = {_NUM}, of {single.prompt} tokens", (single, both))
    if not single.cached or not both.cached:
        return Trial(None, "no hit was seen", (single, both))
    return Trial(True, f"{both.cached} of {both.prompt} with n = {_NUM}, {single.cached} without", (single, both))


async def try_list(auditor: Auditor, api: str) -> Trial:
    """Ask for a long and a short prompt one by one and together, until all are cached wherever they are sent."""
    long, short = auditor.new_prompt(api), auditor.new_prompt(api, 0.5)
    longs, shorts = await auditor.asks(api, long, 2), await auditor.asks(api, short, 2)
    lists = [await auditor.ask(api, long, short) for _ in range(3)]
    last_long, last_short = await auditor.ask(api, long), await auditor.ask(api, short)
    singles = [*longs, *shorts, last_long, last_short]
    if (trial := unanswered([*singles, *lists])) is not None:
        return trial
    shown = (last_long, last_short, lists[-1])
    if lists[-1].num_choices < _NUM:
        return Trial(None, "the answer has one choice", shown, is_offered=False)
    prompts = [last_long.prompt or 0, last_short.prompt or 0]
    counts = [last_long.cached or 0, last_short.cached or 0]
    is_steady = longs[1].cached == counts[0] and shorts[1].cached == counts[1] and min(counts) > SLACK
    said = {exchange.cached or 0 for exchange in lists}
    alone = " and ".join(f"{count} of {prompt}" for count, prompt in zip(counts, prompts, strict=True))
    text = f"{lists[-1].cached} of {lists[-1].prompt} together, {alone} alone"
    if any((exchange.prompt or 0) < sum(prompts) - SLACK for exchange in lists):
        return Trial(False, f"{text}: prompts are left out", shown)
    if max(said) > sum(prompts) + SLACK:
        return Trial(False, text, shown)
    if is_steady and len(said) == 1 and said <= set(counts):
        return Trial(False, f"{text}: cached tokens of only one of them", shown)
    if said == {sum(counts)} and is_steady:
        return Trial(True, text, shown)
    return Trial(None, text, shown)


def _is_times(times: int, count: int | None, single: int | None) -> bool:
    return count is not None and single is not None and abs(count - times * single) <= SLACK < single
