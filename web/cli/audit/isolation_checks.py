"""Whether prompts are kept apart by `cache_salt`, where the server offers it, and by key.

A salt that separates nothing may be one that the server does not know, so it is never called a lie. Two keys are of two
tenants because the user says so.
"""

from __future__ import annotations

import secrets

from .auditor import Auditor, unanswered
from .verdicts import Trial


async def try_salt(auditor: Auditor, api: str) -> Trial:
    prompt = auditor.new_prompt(api)
    ours, theirs = ({"cache_salt": secrets.token_hex(8)} for _ in range(2))
    cold = await auditor.ask(api, prompt, fields=ours)
    warm = await auditor.ask(api, prompt, fields=ours)
    apart = await auditor.ask(api, prompt, fields=theirs)
    back = await auditor.ask(api, prompt, fields=ours)
    if (trial := unanswered([cold, warm, apart, back])) is not None:
        return trial
    shown = (cold, apart)
    if "cache_salt" in cold.ignored:
        return Trial(None, "the server says that it ignores the field", shown, is_offered=False)
    floor = auditor.floor(api)
    if (apart.cached or 0) > floor:
        return Trial(
            None, f"{apart.cached} of {apart.prompt} tokens with another salt: it may not know the field", shown
        )
    if not warm.cached or not back.cached:
        return Trial(None, "no hit with a salt was seen", (cold, warm))
    return Trial(True, f"{warm.cached} of {warm.prompt} with the same salt, {apart.cached} with another", shown)


async def try_key(auditor: Auditor, api: str) -> Trial:
    prompt = auditor.new_prompt(api)
    cold, warm = await auditor.asks(api, prompt, 2)
    apart = await auditor.ask(api, prompt, uses_other_key=True)
    if (trial := unanswered([cold, warm, apart])) is not None:
        return trial
    if (apart.cached or 0) > auditor.floor(api):
        return Trial(False, f"{apart.cached} of {apart.prompt} tokens that another key has sent", (cold, apart))
    if not warm.cached:
        return Trial(None, "no hit was seen with one key", (cold, warm))
    return Trial(
        True, f"{warm.cached} of {warm.prompt} with the same key, {apart.cached} with the other", (cold, apart)
    )
