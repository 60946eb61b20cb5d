"""What our samplers have in common: they stand where vLLM's runner has its own, and draw for one pass at a time.

`logit_sampler.py` and `device_sampler.py` have those of rank 0, `followed_samplers.py` those of the other ranks.

What must always hold: a runner that samples outside of a pass, or runs a pass without sampling, ends the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..step_errors import RunnerDiverged
from .followers import Followers
from .rank_messages import ComputeHead
from .runner_requests import RunnerStep


class InItsPlace:
    """Stands where a runner has its own sampler."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._theirs = runner.sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)  # what the runner reads of a sampler besides calling it


class PassOfStep(Protocol):
    """What a sampler keeps of the pass that it draws for."""

    @property
    def step(self) -> RunnerStep: ...


P = TypeVar("P", bound=PassOfStep)


class PassSampler(InItsPlace, Generic[P]):
    """Draws what `begin` has announced, and is done with it in `finish`."""

    def __init__(self, runner: Any, followers: Followers) -> None:
        """`followers` are told what was drawn, and take part in computing logits."""
        super().__init__(runner)
        self._followers = followers
        self._pass: P | None = None

    def _running(self) -> P:
        """Return the pass of which the runner samples. Raises RunnerDiverged if there is none."""
        if self._pass is None:
            raise RunnerDiverged("vLLM's runner samples outside of a pass")
        return self._pass

    def _end(self) -> P | None:
        """Return the pass that has run, if any, and forget it."""
        ended, self._pass = self._pass, None
        return ended

    def _head(
        self, one: P, order: Sequence[int], hidden_states_ND: torch.Tensor, as_floats: Callable[[torch.Tensor], Any]
    ) -> Callable[[list[int]], tuple[torch.Tensor, range]]:
        """Return a function that computes the logits of flat tokens of the batch, for `add_scores`.

        `order`: rows in the order of the runner, in which `hidden_states_ND` are.
        """
        flat = one.step.flat_places(order)

        def head(tokens: list[int]) -> tuple[torch.Tensor, range]:
            places = [flat[token] for token in tokens]
            with self._followers.entering(ComputeHead(places)):
                logits_NV = self._runner.model.compute_logits(hidden_states_ND[places])
            return as_floats(logits_NV), range(len(tokens))

        return head


def not_sampled() -> RunnerDiverged:
    """Return the error for a pass whose tokens the runner has not asked for."""
    return RunnerDiverged("vLLM's runner has run a pass without sampling")
