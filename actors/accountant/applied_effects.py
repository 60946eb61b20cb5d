"""Which side effects of an open request have been applied: flags and numbers that outlive a crash of the accountant.

Part of the entry store; set by `effects.py`, each together with its side effect. Pure.
"""

from __future__ import annotations

import attrs

from ..messages.counts import Count, billable
from .account import Account


@attrs.frozen
class CountedPrompt:
    """A prompt's numbers as they were added to the counters."""

    num_prompt_tokens: int
    cached: Count


@attrs.define
class AppliedEffects:
    """Which side effects of a request have been applied, so that none is applied twice."""

    counted_prompts: dict[int, CountedPrompt] = attrs.field(factory=dict)
    had_hit: bool = False
    """Any of them was found in the cache, as its engine has counted."""
    is_withdrawn: bool = False
    """The journal had no room for it: its prompts are not counted."""
    told: tuple[int | None, ...] = ()
    retry_of: str | None = None
    engine_id: int | None = None
    """The engine of the first admission that was counted, of whichever prompt..."""
    incarnation: int | None = None
    """...which of its processes that was..."""
    admitted_at: float | None = None
    """...and when. Entries of earlier prompts may come later, and from other engines."""
    timed_first_token: bool = False
    stopped: bool = False
    is_answered: bool = False
    """Its client was told that the deadline has passed, before the engine ended the request."""
    counted_end: bool = False
    is_filed: bool = False

    def count(self, prompt_index: int, num_prompt_tokens: int, cached: Count) -> None:
        """Note that a prompt is added to the counters, with these numbers."""
        self.counted_prompts[prompt_index] = CountedPrompt(num_prompt_tokens, cached)
        self.had_hit |= bool(billable(cached))

    def note_first_admission(self, account: Account) -> None:
        """Note which admission was the first that was counted."""
        self.engine_id, self.incarnation, self.admitted_at = account.engine_id, account.incarnation, account.admitted_at

    def keep_first_admission(self, account: Account) -> None:
        """Have an account that is made anew begin with the admission that was the first, if there was one."""
        if self.admitted_at is not None:
            account.engine_id, account.incarnation = self.engine_id, self.incarnation
            account.admitted_at = self.admitted_at
