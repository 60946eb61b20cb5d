"""A standing sequence: what the executor keeps of it from its `Admit` until it is released.

Owned by `step_runner.py`, which resolves the rows of a plan with it (`step_rows.py`) and makes batches of them
(`batch_builder.py`).

    tokens        p p p p p p o o        p prompt, o output drawn
    num_computed  - - - - - - - ^        the KV of the last token is not written: the next row feeds it

What must always hold: `tokens` are those that were fed, then those that will be; the processor and the grammar know all
of them, or do not exist.
"""

from __future__ import annotations

import attrs

from quipu.kernels.logit_processors import LogitProcessor
from quipu.kernels.step_types import RowSampling, SequenceKind

from ...messages.executor import Admit
from ...messages.sampling import SamplingParams
from .sequence_grammar import SequenceGrammar


def changes_logits(sampling: SamplingParams) -> bool:
    """Return whether a sequence's logits may be changed before a token is drawn."""
    return sampling.rules is not None or sampling.grammar is not None


@attrs.define(eq=False)
class SequenceState:
    """One sequence between its steps."""

    slot: int
    sampling: SamplingParams
    num_outputs: int
    """Outputs drawn so far, by this admission and earlier ones."""
    keys: list[bytes]
    """Chain keys of its full blocks, preceded by the root key."""
    tokens: list[int]
    """Every token that is known, from position 0 on."""
    max_len: int = 1 << 62
    stop_ids: frozenset[int] = frozenset()
    kind: SequenceKind = SequenceKind.GENERATE
    adapter: str = ""
    num_computed: int = 0
    """Positions whose KV is written, or granted."""
    table: list[int] = attrs.field(factory=list)
    processor: LogitProcessor | None = None
    """Created at its first drawn token if its sampling has rules; from then on given every token."""
    grammar: SequenceGrammar | None = None
    """Created and kept like `processor`, if its output has to match a grammar."""
    row_sampling: RowSampling = attrs.field(init=False)
    """Its sampling parameters for every batch: made once, shared by all its rows."""

    @row_sampling.default
    def _make_row_sampling(self) -> RowSampling:
        # A top_p of 0 leaves the likeliest token alone; backends need not know it.
        return self.sampling if self.sampling.top_p else attrs.evolve(self.sampling, temperature=0.0, top_p=1.0)

    @classmethod
    def of(cls, admit: Admit, slot: int) -> SequenceState:
        """Make the state of a sequence that is admitted."""
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
        )

    @property
    def draws_only_one(self) -> bool:
        """Whether it advances one position a pass whatever it may: the mask of the next output needs the last."""
        return self.sampling.grammar is not None

    def logit_processor(self) -> LogitProcessor | None:
        """Return what changes its logits, if its sampling has rules. All tokens before the next one must be known."""
        rules = self.sampling.rules
        if rules is None:
            return None
        if self.processor is None:
            num_prompt_tokens = len(self.tokens) - self.num_outputs
            self.processor = LogitProcessor(rules, self.tokens[:num_prompt_tokens], self.tokens[num_prompt_tokens:])
        return self.processor

    def sequence_grammar(self) -> SequenceGrammar | None:
        """Return what masks its logits, if its output has to match a grammar. All tokens must be known, likewise."""
        if self.grammar is None and self.sampling.grammar is not None:
            outputs = self.tokens[len(self.tokens) - self.num_outputs :]
            self.grammar = SequenceGrammar(self.sampling.grammar, outputs, ends_early=not self.sampling.ignore_eos)
        return self.grammar

    def up_to_its_end(self, token_ids: list[int]) -> list[int]:
        """Return the first of these tokens, up to one that ends the sequence."""
        for at, token_id in enumerate(token_ids, 1):
            if token_id in self.stop_ids:
                return token_ids[:at]
        return token_ids

    def append_output(self, token_id: int) -> None:
        """Record a drawn token."""
        self.tokens.append(token_id)
        self.num_outputs += 1
        if self.processor is not None:
            self.processor.add_output(token_id)
        if self.grammar is not None:
            self.grammar.add_output(token_id)

    def take_back(self, start: int, num_tokens: int, block_size: int) -> None:
        """Forget a pass that began at position `start`, while there were so many tokens."""
        self.num_computed = start
        del self.keys[1 + start // block_size :]
        num_drawn = len(self.tokens) - num_tokens
        if num_drawn:
            self.num_outputs -= num_drawn
            self.processor = self.grammar = None  # made again from the tokens
            del self.tokens[num_tokens:]
