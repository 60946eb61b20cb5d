"""Holds text back that is ahead of the numbers of its prompt. Used by the mailboxes of requests with several choices.

What a client is told of a prompt is the admission of its first choice. If its engine dies before that was heard, the
next one may continue another choice first.

What must always hold: text of a choice keeps its order; what is held is bounded by what the choices may produce.
"""

from __future__ import annotations

from ..messages.handler import Closed, Delta, OutletEvent, Started


class EarlyText:
    def __init__(self, num_prompts: int, num_choices: int) -> None:
        self._num_choices = num_choices
        self._unknown = set(range(num_prompts))
        """Prompts whose numbers are not known."""
        self._held: list[Delta] = []

    def let_through(self, event: OutletEvent) -> list[OutletEvent]:
        """Return what comes out with this event: it, unless it is held, and what has waited for it."""
        if isinstance(event, Delta):
            if event.index // self._num_choices not in self._unknown:
                return [event]
            self._held.append(event)
            return []
        if isinstance(event, Closed):
            held, self._held = self._held, []
            return [*held, event]
        self._note_known(event)
        ready = [delta for delta in self._held if delta.index // self._num_choices not in self._unknown]
        self._held = [delta for delta in self._held if delta.index // self._num_choices in self._unknown]
        return [event, *ready]

    def _note_known(self, started: Started) -> None:
        if started.by_prompt:
            self._unknown.difference_update(started.by_prompt)
        else:
            self._unknown.clear()  # there is only one

    @property
    def is_over(self) -> bool:
        """Whether nothing will be held any more."""
        return not self._unknown
