"""Times to the first token, beside what is said to be cached.

A time proves nothing: servers are busy, shapes are compiled, gateways answer from memory. So no verdict here is
`false`; what does not fit together is `unknown`, and called doubtful.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import attrs

from .ladder import Rungs
from .verdicts import Trial

_TELLING_S = 0.05
"""A new prompt that takes less says nothing about the cache."""
_SLOW, _SAVING, _FAST = 0.9, 0.7, 0.5
"""Of the time of a new prompt: a repeated one that takes more saved nothing, one that takes less saved some. The last
is for prompts of which 0 is said: the slowest repeated one compared with the fastest new one."""
_TELLING_SHARE = 0.5
"""So much of a prompt has to be cached that it should be seen in its time."""


@attrs.frozen
class Times:
    cold_s: tuple[float, ...]
    warm_s: tuple[float, ...]

    @property
    def ratio(self) -> float | None:
        if not (self.cold_s and self.warm_s and statistics.median(self.cold_s) > 0):
            return None
        return statistics.median(self.warm_s) / statistics.median(self.cold_s)


def times_of(ladders: Sequence[Rungs]) -> Times:
    colds = (rungs.cold.first_output_s for rungs in ladders)
    warms = (exchange.first_output_s for rungs in ladders for exchange in rungs.warms)
    return Times(tuple(time for time in colds if time is not None), tuple(time for time in warms if time is not None))


def judge_times(ladders: Sequence[Rungs]) -> Trial:
    """Judge whether repeated prompts are as fast as what is said of them."""
    times = times_of(ladders)
    shown = (ladders[-1].cold, ladders[-1].warm) if ladders else ()
    counts = [exchange.cached for rungs in ladders for exchange in rungs.warms if exchange.is_answered]
    prompts = [exchange.prompt for rungs in ladders for exchange in rungs.warms if exchange.prompt]
    ratio = times.ratio
    if ratio is None or len(times.cold_s) < 2:
        return Trial(None, "no times to the first token", shown)
    cold_ms, warm_ms = (statistics.median(values) * 1000 for values in (times.cold_s, times.warm_s))
    text = f"first token after {cold_ms:.0f} ms when new, {warm_ms:.0f} ms when repeated"
    if min(times.cold_s) < _TELLING_S:
        return Trial(None, f"{text}: too fast to tell, try a larger --prompt-tokens", shown)
    said = [count for count in counts if count is not None]
    share = statistics.median(said) / max(prompts) if said and prompts else 0.0
    is_fast = max(times.warm_s) < _FAST * min(times.cold_s)
    is_slow = ratio > _SLOW
    if share >= _TELLING_SHARE:
        if is_slow:
            return Trial(None, f"doubtful: {text}, although {said[-1]} tokens are said to be cached", shown)
        return Trial(True, text, shown) if ratio < _SAVING else Trial(None, f"{text}: no clear difference", shown)
    if said and not any(said) and is_slow:
        return Trial(True, f"{text}, and 0 cached", shown)
    if is_fast:
        what = "0 is said to be cached" if said and not any(said) else "the server does not say what is cached"
        return Trial(None, f"doubtful: {text}, as of a hit, while {what}", shown)
    return Trial(None, f"{text}, {said[-1] if said else 'nothing'} said to be cached", shown)
