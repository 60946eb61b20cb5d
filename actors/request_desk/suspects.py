"""Which of the requests that an engine held when it died may have killed it, and which of them may run meanwhile. Pure.

A death counts against the requests of the step that the engine was running, or against all that it held if that is not
known; half as much against the others that it held. It is forgotten when the request makes progress on an engine.

    first death         everything is resumed
    second in a row     if it counts against the same requests, they are tried in halves, one half at a time, and then
                        the others that made no progress in between; what has not made progress on this engine waits
    death of a trial    its half is halved again; a request is tried alone until two deaths count against it, and is
                        then the culprit

What must always hold: a request is named as the culprit only if engines died twice in a row while it was tried alone,
and no other request without progress was running; of n requests, one that kills every engine in its steps is found by
at most log2(n) + 2 deaths after the second.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import attrs

from ..shared.halves import halves

IN_STEP, OUTSIDE = 2, 1
"""What a death counts against a request."""
SUSPICIOUS = 2 * IN_STEP
"""From which count on a request is tried, and from which on it is the culprit if it was tried alone."""


@attrs.frozen
class Verdict:
    """The fate of the requests that a dead engine held."""

    resumed: list[str]
    """They may run on the next engine at once. All others wait."""
    culprit: str | None = None


class Suspects:
    """The requests to which engine deaths may be due."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        """By request: the sum of what deaths since its last progress count against it."""
        self._proven: set[str] = set()
        """Requests that have made progress on the present engine; kept while there is any suspicion."""
        self._trial: set[str] = set()
        self._untried: list[Sequence[str]] = []
        """Groups of suspects that wait until the trial is over."""
        self._count_alone = 0
        """What deaths count against the request that is tried alone, since then."""
        self.num_culprits = 0
        """Culprits in a row without progress in between; several mean that requests are not the cause."""

    @property
    def is_active(self) -> bool:
        """Whether progress has to be reported."""
        return bool(self._counts)

    @property
    def is_searching(self) -> bool:
        """Whether some suspects run while others wait."""
        return bool(self._trial)

    def may_run(self, request_id: str) -> bool:
        """Return whether a request need not wait for the end of a search."""
        return not self._trial or request_id in self._proven or request_id in self._trial

    def on_death(self, held: Sequence[str], in_step: Container[str] | None = None) -> Verdict:
        """Decide about the requests that the dead engine held, in their order.

        `in_step`: those of the step that it was running; None if that is not known.
        """
        counts, unheld = self._counts, self._trial.difference(held)
        if not held:
            return Verdict([])
        blamed = {request_id for request_id in held if in_step is None or request_id in in_step}
        for request_id in held:
            counts[request_id] = counts.get(request_id, 0) + (IN_STEP if request_id in blamed else OUTSIDE)
        idle = [request_id for request_id in held if request_id not in self._proven]
        culprit, count_alone = None, 0
        if self._trial:
            trial = [request_id for request_id in held if request_id in self._trial]
            again = [i for i in held if i not in self._trial and counts[i] >= SUSPICIOUS]
            if again:
                self._untried.append(again)
            if len(trial) == 1 and not unheld:
                count_alone = self._count_alone + (IN_STEP if trial[0] in blamed else OUTSIDE)
                if count_alone >= SUSPICIOUS:
                    (culprit,) = trial
                else:
                    self._untried.insert(0, trial)
            else:
                self._untried[:0] = halves(trial)
        elif suspicious := [i for i in idle if counts[i] >= SUSPICIOUS]:
            others = [i for i in idle if counts[i] < SUSPICIOUS]
            self._untried = [*halves(suspicious), *([others] if others else [])]
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
        if culprit is None:
            self._count_alone = count_alone
        return Verdict([i for i in held if self.may_run(i) and i != culprit], culprit)

    def on_progress(self, request_ids: Iterable[str]) -> None:
        """Note that an engine has done work for requests. Others may run now that had to wait."""
        for request_id in request_ids:
            if self._counts.pop(request_id, None) is not None:
                self.num_culprits = 0
            self._proven.add(request_id)
            self._trial.discard(request_id)
        self._advance()
        if not self.is_active:
            self._proven.clear()

    def on_end(self, request_id: str) -> None:
        """Note that a request has ended. Others may run now that had to wait."""
        self._counts.pop(request_id, None)
        self._proven.discard(request_id)
        self._trial.discard(request_id)
        self._untried = [left for group in self._untried if (left := [i for i in group if i != request_id])]
        self._advance()

    def _advance(self) -> None:
        """Begin the next trial if the last one is over."""
        if not self._trial and self._untried:
            self._trial = set(self._untried.pop(0))
            self._count_alone = 0
