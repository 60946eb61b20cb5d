"""What the prompts and sequences of an account add up to. Pure."""

from __future__ import annotations

from collections import Counter

from ..messages.block_manager import CacheMiss
from ..messages.counts import Count, Known, total
from ..messages.handler import PromptNumbers
from ..messages.prompts import CacheTtl
from .account_entries import Admission
from .prompt_account import TIERS, UNATTRIBUTED, PromptAccount, told_by_prompt
from .sequence_account import SequenceAccount


class AccountSums:
    """The sums of an `Account`, which books what it has."""

    def __init__(self) -> None:
        self.sequences: dict[int, SequenceAccount] = {}
        self.prompts: dict[int, PromptAccount] = {}

    # ------------------------------------------------------------ prompts

    @property
    def admitted_prompts(self) -> list[PromptAccount]:
        """Prompts whose numbers are known and frozen."""
        return [prompt for prompt in self.prompts.values() if prompt.is_admitted]

    @property
    def num_frozen_prompts(self) -> int:
        """Admitted prompts whose written tokens are frozen too."""
        return sum(prompt.frozen_write_tokens is not None for prompt in self.admitted_prompts)

    @property
    def prompt_tokens(self) -> Count:
        return total(Known(prompt.num_prompt_tokens) for prompt in self.admitted_prompts)

    @property
    def cached(self) -> Count:
        return total(prompt.cached for prompt in self.admitted_prompts)

    @property
    def router_estimate(self) -> int | None:
        """The cached tokens that a router expected; None if no router said so."""
        admitted = self.admitted_prompts
        estimates = [prompt.estimated for prompt in admitted if prompt.estimated is not None]
        return sum(estimates) if admitted and len(estimates) == len(admitted) else None

    @property
    def cache_write(self) -> Count:
        return total(Known(prompt.cache_write_tokens) for prompt in self.admitted_prompts)

    @property
    def cache_misses(self) -> tuple[CacheMiss, ...]:
        return tuple(prompt.miss for prompt in self.admitted_prompts if prompt.miss is not None)

    def created(self, ttl: CacheTtl) -> int:
        """Written tokens up to each prompt's last breakpoint that belong to breakpoints with this ttl."""
        return sum(prompt.created[ttl] for prompt in self.admitted_prompts)

    @property
    def cached_by_tier(self) -> dict[str, int] | None:
        """Cached tokens by tier, summed over the prompts; None if they are not known for each prompt."""
        if not isinstance(self.cached, Known):
            return None
        tiers = dict.fromkeys((*TIERS, UNATTRIBUTED), 0)
        for prompt in self.admitted_prompts:
            for tier, num_tokens in prompt.by_tier.items():
                tiers[tier] += num_tokens
        return tiers

    def told_by_prompt(self) -> dict[int, PromptNumbers]:
        """Return what the client is told about each prompt that was admitted, if it sent several."""
        return told_by_prompt(self.prompts) if len(self.prompts) > 1 else {}

    # ------------------------------------------------------------ sequences

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has its finish reason."""
        return all(sequence.finish_reason is not None for sequence in self.sequences.values())

    @property
    def moved(self) -> Counter[int | None]:
        """Prompt tokens that came from another engine, by the engine that they came to."""
        return sum((sequence.moved for sequence in self.sequences.values() if sequence.moved), Counter())

    @property
    def deaths(self) -> set[int]:
        """Incarnations of the engines that died while they held any sequence."""
        return set().union(*(sequence.deaths for sequence in self.sequences.values()))

    @property
    def continued_by(self) -> Admission | None:
        """The last admission of the first sequence that another process of an engine has continued."""
        return next(filter(None, (sequence.continued_by for sequence in self.sequences.values())), None)

    def counts(self) -> dict[str, int]:
        """Return the fields of a record that are sums over the sequences."""
        sequences = list(self.sequences.values())
        return {
            "num_choices": len(sequences),
            "completion_tokens": sum(sequence.num_completion_tokens for sequence in sequences),
            "reasoning_tokens": sum(sequence.num_reasoning_tokens for sequence in sequences),
            "computed_tokens": sum(sequence.computed_first for sequence in sequences),
            "restored_tokens": sum(sequence.restored_first for sequence in sequences),
            "recomputed_tokens": sum(sequence.recomputed for sequence in sequences),
            "draft_tokens": sum(sequence.drafted.num_tokens for sequence in sequences),
            "accepted_draft_tokens": sum(sequence.drafted.num_accepted for sequence in sequences),
            "accepted_prediction_tokens": sum(sequence.of_prediction.accepted for sequence in sequences),
            "rejected_prediction_tokens": sum(sequence.of_prediction.rejected for sequence in sequences),
        }

    def problems(self) -> list[str]:
        """Describe what does not add up or cannot be; empty for a balanced account."""
        parts = [(f"sequence {i}", sequence.problems()) for i, sequence in self.sequences.items()]
        parts += [(f"prompt {i}", prompt.problems()) for i, prompt in self.prompts.items()]
        return [f"{part}: {problem}" for part, problems in parts for problem in problems]
