"""How the tokens of a request are drawn. Made by `web/`, completed by the tokenizer, obeyed by the backends."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class LogitRules:
    """How one sequence's logits are changed before a token is drawn, as `kernels/logit_processors.py` defines it."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: Mapping[int, float] = attrs.field(factory=dict)
    """By token id."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """As token ids, which the tokenizer puts in: a request has words."""
    min_tokens: int = 0
    held_back_token_ids: tuple[int, ...] = ()
    """Not drawn before there are `min_tokens` outputs. The tokenizer puts in whatever ends the sequence."""


@attrs.frozen
class SamplingParams:
    """How the tokens of one sequence are drawn. Checked by the web layer, never again below it."""

    max_tokens: int
    """Output tokens at most, at least 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """In (0, 1]; 1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """In [0, 1]; 0 is off."""
    seed: int = 0
    """64 bits; with the output's position it keys Philox, so a draw depends on nothing else."""
    stop_token_ids: tuple[int, ...] = ()
    """End the sequence when drawn; counted in the completion, not shown."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens are told beside each drawn one and its logprob. None: nothing is told."""
    prompt_logprobs: int | None = None
    """The same of every prompt token but the first."""
    rules: LogitRules | None = None
    """None, as nearly always: logits are drawn from as they are."""
