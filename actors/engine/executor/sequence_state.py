"""The state that the executor keeps of a sequence from its `Admit` until it is released.

Owned by `step_runner.py`, which uses it to resolve the rows of a plan (`step_rows.py`) and to make batches of them
(`batch_builder.py`).

    tokens        p p p p p p o o        p prompt, o output drawn
    num_computed  - - - - - - - ^        the KV of the last token is not written: the next row feeds it

What must always hold: `tokens` are the tokens that were fed, followed by those still to be fed; the processor and the
grammar, where they exist, know all of them.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from quipu.kernels.logit_processors import LogitProcessor
from quipu.kernels.step_types import RowSampling, SequenceKind

from ...messages.executor import Admit
from ...messages.images import PromptImage
from ...messages.sampling import SamplingParams
from .sequence_grammar import SequenceGrammar

MOST_LATE = 64
"""Tokens that steps may draw for a sequence after the one that ended it, since they were sent before that was known."""


def changes_logits(sampling: SamplingParams) -> bool:
    """Return whether a sequence's logits may be changed before sampling."""
    return sampling.rules is not None or sampling.grammar is not None


@attrs.define(eq=False)
class SequenceState:
    """One sequence between its steps."""

    slot: int
    sampling: SamplingParams
    num_outputs: int
    """Number of outputs sampled so far, in this admission and earlier ones."""
    keys: list[bytes]
    """Chain keys of its full blocks, preceded by the root key."""
    tokens: list[int]
    """All known tokens, from position 0 on."""
    max_len: int = 1 << 62
    stop_ids: frozenset[int] = frozenset()
    kind: SequenceKind = SequenceKind.GENERATE
    adapter: str = ""
    images: tuple[PromptImage, ...] = ()
    pooled: npt.NDArray[np.float64] | None = None
    """Sum of the outputs of its positions so far, if its vector is a mean."""
    num_computed: int = 0
    """Number of positions whose KV is written or granted."""
    table: list[int] = attrs.field(factory=list)
    processor: LogitProcessor | None = None
    """Created at its first sampled token if its sampling has rules; given every token from then on."""
    grammar: SequenceGrammar | None = None
    """Created and updated like `processor`, if its output has to match a grammar."""
    row_sampling: RowSampling = attrs.field(init=False)
    """Its sampling parameters for every batch: created once, shared by all its rows."""

    @row_sampling.default
    def _make_row_sampling(self) -> RowSampling:
        # a top_p of 0 leaves only the likeliest token; backends need not know this case
        return self.sampling if self.sampling.top_p else attrs.evolve(self.sampling, temperature=0.0, top_p=1.0)

    @classmethod
    def of(cls, admit: Admit, slot: int) -> SequenceState:
        """Create the state of an admitted sequence."""
        return cls(
            slot=slot,
            sampling=admit.sampling,
            num_outputs=admit.num_outputs,
            keys=[admit.root_key, *admit.keys],
            tokens=list(admit.tokens),
            max_len=admit.max_len,
            stop_ids=admit.stop_ids,
            kind=admit.kind,
            adapter=admit.adapter,
            images=admit.images,
        )

    def logit_processor(self) -> LogitProcessor | None:
        """Return its logit processor, if its sampling has rules. All tokens before the next one must be known."""
        rules = self.sampling.rules
        if rules is None:
            return None
        if self.processor is None:
            num_prompt_tokens = len(self.tokens) - self.num_outputs
            self.processor = LogitProcessor(rules, self.tokens[:num_prompt_tokens], self.tokens[num_prompt_tokens:])
        return self.processor

    def sequence_grammar(self) -> SequenceGrammar | None:
        """Return its grammar, if its output has to match one. All tokens before the next one must be known."""
        if self.grammar is None and self.sampling.grammar is not None:
            outputs = self.tokens[len(self.tokens) - self.num_outputs :]
            self.grammar = SequenceGrammar(self.sampling.grammar, outputs, ends_early=not self.sampling.ignore_eos)
        return self.grammar

    @property
    def has_ended(self) -> bool:
        """Whether its last token ends it."""
        return self.tokens[-1] in self.stop_ids

    @property
    def is_over(self) -> bool:
        """Whether no further pass can yield anything for it. One that was aborted is not known to be."""
        if not self.num_outputs:
            return self.num_computed >= self.max_len
        latest = self.tokens[-min(self.num_outputs, MOST_LATE) :]
        return len(self.tokens) >= self.max_len or not self.stop_ids.isdisjoint(latest)

    def up_to_its_end(self, token_ids: list[int]) -> list[int]:
        """Return these tokens up to and including the first one that ends the sequence."""
        for at, token_id in enumerate(token_ids, 1):
            if token_id in self.stop_ids:
                return token_ids[:at]
        return token_ids

    def append_output(self, token_id: int) -> None:
        """Record a sampled token."""
        self.tokens.append(token_id)
        self.num_outputs += 1
        if self.processor is not None:
            self.processor.add_output(token_id)
        if self.grammar is not None:
            self.grammar.add_output(token_id)

    def take_back(self, start: int, num_tokens: int, block_size: int) -> None:
        """Undo a pass that began at position `start`, when the sequence had `num_tokens` tokens."""
        self.num_computed = start
        del self.keys[1 + start // block_size :]
        num_drawn = len(self.tokens) - num_tokens
        if num_drawn:
            self.num_outputs -= num_drawn
            self.processor = self.grammar = None  # recreated from the tokens
            del self.tokens[num_tokens:]
