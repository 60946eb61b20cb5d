"""Which of the requests that an engine held when it died may have killed it, and which of them may run meanwhile.

Used by the engine's lane. Pure. A death counts against every request that the engine held, since the step under way is
not known here, and is forgotten when the request makes progress on an engine.

    first death         everything is resumed
    second in a row     those that made no progress in between are tried in halves, one half at a time; what has not
                        made progress on this engine waits until they are through
    death of a trial    its half is halved again; the request that was tried alone is the culprit

What must always hold: a request is named as the culprit only if the engine died while no other request without progress
was running; of n requests, one that kills every engine is found by at most log2(n) + 2 deaths after the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from ..shared.halves import halves


@attrs.frozen
class Verdict:
    """What becomes of the requests that a dead engine held."""

    resumed: list[str]
    """They may run on the next engine at once. All others wait."""
    culprit: str | None = None


class Suspects:
    """The requests to which engine deaths may be due."""

    def __init__(self) -> None:
        self._num_deaths: dict[str, int] = {}
        """By request: deaths of engines that held it since it last made progress."""
        self._proven: set[str] = set()
        """Requests that have made progress on the present engine; kept while there is any suspicion."""
        self._trial: set[str] = set()
        """Suspects that run."""
        self._untried: list[Sequence[str]] = []
        """Groups of suspects that wait until the trial is over."""
        self.num_culprits = 0
        """Found in a row, without any progress in between: more than one means that it is not the requests."""

    @property
    def is_active(self) -> bool:
        """Whether progress has to be reported."""
        return bool(self._num_deaths)

    @property
    def is_searching(self) -> bool:
        """Whether some suspects run while others wait."""
        return bool(self._trial)

    def may_run(self, request_id: str) -> bool:
        """Return whether a request need not wait for the end of a search."""
        return not self._trial or request_id in self._proven or request_id in self._trial

    def on_death(self, held: Sequence[str]) -> Verdict:
        """Decide about the requests that the dead engine held, in their order."""
        counts, unheld = self._num_deaths, self._trial.difference(held)
        if not held:
            return Verdict([])
        for request_id in held:
            counts[request_id] = counts.get(request_id, 0) + 1
        idle = [request_id for request_id in held if request_id not in self._proven]
        culprit = None
        if self._trial:
            trial = [request_id for request_id in held if request_id in self._trial]
            again = [i for i in held if i not in self._trial and counts[i] > 1]
            if again:
                self._untried.append(again)
            if len(trial) == 1 and not unheld:
                (culprit,) = trial
            else:
                self._untried[:0] = halves(trial)
        elif any(counts[request_id] > 1 for request_id in idle):
            if len(idle) == 1:
                (culprit,) = idle
            else:
                self._untried = halves(idle)
        else:
            self._proven.clear()
            return Verdict(list(held))
        if culprit is not None:
            self.num_culprits += 1
            counts.pop(culprit, None)
        waiting = {request_id for group in self._untried for request_id in group}
        self._proven = {i for i in held if i not in waiting and i != culprit}
        self._trial = unheld  # these are queued for the next engine
        self._advance()
        return Verdict([i for i in held if self.may_run(i) and i != culprit], culprit)

    def on_progress(self, request_ids: Iterable[str]) -> None:
        """Note that an engine has done work for requests. Others may run now that had to wait."""
        for request_id in request_ids:
            if self._num_deaths.pop(request_id, None) is not None:
                self.num_culprits = 0
            self._proven.add(request_id)
            self._trial.discard(request_id)
        self._advance()
        if not self._num_deaths:
            self._proven.clear()

    def on_end(self, request_id: str) -> None:
        """Note that a request is over. Others may run now that had to wait."""
        self._num_deaths.pop(request_id, None)
        self._proven.discard(request_id)
        self._trial.discard(request_id)
        self._untried = [left for group in self._untried if (left := [i for i in group if i != request_id])]
        self._advance()

    def _advance(self) -> None:
        """Begin the next trial if the last one is over."""
        if not self._trial and self._untried:
            self._trial = set(self._untried.pop(0))
