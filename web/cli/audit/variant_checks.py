"""Fields that must not change what is said of a prompt: a stop string, `max_tokens: 1`, and the API itself."""

from __future__ import annotations

from typing import Any

from .auditor import Auditor, unanswered
from .ladder_checks import judge_pairs
from .verdicts import Trial

_NEVER_SAID = "quipu audit: never said"


async def compare_stop(auditor: Auditor, api: str) -> Trial:
    if api == "responses":
        return Trial(None, "responses have no stop strings", is_offered=False)
    name = "stop_sequences" if api == "messages" else "stop"
    return await _compare(auditor, api, "with a stop string", fields={name: [_NEVER_SAID]})


async def compare_max_tokens(auditor: Auditor, api: str) -> Trial:
    return await _compare(auditor, api, "with one token of output", max_tokens=1)


async def compare_apis(auditor: Auditor, api: str, other: str) -> Trial:
    """Send one text by turns to two APIs."""
    prompt = auditor.new_prompt("chat")
    turns = [(await auditor.ask(other, prompt), await auditor.ask(api, prompt)) for _ in range(4)]
    pairs = turns[1:]  # the first fills the cache
    if (trial := unanswered([exchange for pair in pairs for exchange in pair])) is not None:
        return trial
    first = pairs[0]
    if first[0].prompt != first[1].prompt:
        return Trial(None, f"{first[1].prompt} and {first[0].prompt} tokens: not the same prompt", first)
    return judge_pairs([pair[0] for pair in pairs], [pair[1] for pair in pairs], f"{api} says")


async def _compare(auditor: Auditor, api: str, name: str, **changes: Any) -> Trial:
    """Send one prompt by turns as it is and with a change."""
    prompt = auditor.new_prompt(api)
    await auditor.ask(api, prompt)
    plain, changed = [], []
    for _ in range(3):
        plain.append(await auditor.ask(api, prompt))
        changed.append(await auditor.ask(api, prompt, **changes))
    if (trial := unanswered(plain)) is not None:
        return trial
    answered = [exchange for exchange in changed if exchange.is_answered]
    if len(answered) == len(changed) and not any(exchange.cached is not None for exchange in changed):
        return Trial(False, f"{name} there is no count, without {plain[0].cached}", (plain[-1], changed[-1]))
    if (trial := unanswered(changed)) is not None:
        return trial
    return judge_pairs(plain, changed, name)
