"""Which tokens a sequence has in its prompt and its output, and how often: what penalties need to know.

What must always hold: adding an output takes constant time (amortized), and the columns need no conversion before numpy
can index logits with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


class SeenTokens:
    """Distinct tokens of a prompt (P) and distinct outputs (O), and how often each output was drawn."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = frozenset(prompt_token_ids)
        self.prompt_ids = distinct_ids(self._prompt)
        """P, ascending."""
        self._place: dict[int, int] = {}
        self._ids: Ids = np.zeros(64, dtype=np.int64)
        self._counts: npt.NDArray[np.float64] = np.zeros(64, dtype=np.float64)
        self._are_new: npt.NDArray[np.bool_] = np.zeros(64, dtype=np.bool_)

    @property
    def output_ids(self) -> Ids:
        """O."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """O. At least 1."""
        return self._counts[: len(self._place)]

    @property
    def are_new(self) -> npt.NDArray[np.bool_]:
        """O. Whether the prompt lacks the token."""
        return self._are_new[: len(self._place)]

    def __copy__(self) -> SeenTokens:
        """Return one to which outputs can be added apart from this one."""
        other = object.__new__(SeenTokens)
        vars(other).update(
            vars(self),
            _place=dict(self._place),
            _ids=self._ids.copy(),
            _counts=self._counts.copy(),
            _are_new=self._are_new.copy(),
        )
        return other

    def count(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == len(self._ids):
                self._ids = _doubled(self._ids)
                self._counts = _doubled(self._counts)
                self._are_new = _doubled(self._are_new)
            self._ids[place] = token_id
            self._are_new[place] = token_id not in self._prompt
        self._counts[place] += 1


def distinct_ids(token_ids: Iterable[int]) -> Ids:
    """Return the distinct ids, ascending."""
    return np.array(sorted(set(token_ids)), dtype=np.int64)


def _doubled(values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    return np.concatenate((values, np.zeros_like(values)))
