"""How the tokens of a request are drawn. Made by `web/`, completed by the tokenizer, obeyed by the backends.

Each field that clients can send is declared here with `sampling_field`: what all APIs read and refuse, and the table
in `docs/sampling.md`, follow from that. A backend that applies a field is the only other place that names it.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ..declarations import EVERY_API, Bounds, sampling_field, sampling_fields_of


@attrs.frozen
class LogitRules:
    """How one sequence's logits are changed before a token is drawn, as `kernels/logit_processors.py` defines it."""

    presence_penalty: float = sampling_field(
        0.0, "subtracted from the logit of each token that was generated", minimum=-2, maximum=2
    )
    frequency_penalty: float = sampling_field(
        0.0, "subtracted for each time that the token was generated", minimum=-2, maximum=2
    )
    repetition_penalty: float = sampling_field(
        1.0,
        "a positive logit of a token of the prompt or the output is divided by it, a negative one multiplied",
        above=0,
    )
    bias: Mapping[int, float] = sampling_field(
        attrs.Factory(dict),
        "added to the logits of these tokens; an empty object is none",
        name="logit_bias",
        reader="biases",
        minimum=-100,
        maximum=100,
        max_length=1024,
        values="up to 1024 pairs of a token id and a number between -100 and 100",
        off=({},),
    )
    allowed_token_ids: tuple[int, ...] = sampling_field(
        (), "no other token is drawn", reader="some_token_ids", values="a list of token ids that is not empty", off=()
    )
    bad_words: tuple[tuple[int, ...], ...] = sampling_field(
        (),
        "no output holds one of them; see below",
        reader="words",
        max_length=256,
        values="up to 256 words, of up to 256 characters that are not all white space",
        off=([],),
    )
    """As token ids, which the tokenizer puts in: a request has words."""
    min_tokens: int = sampling_field(
        0,
        "number of tokens that come before one that ends the choice (EOS, `stop_token_ids`), and before a stop string "
        "may be complete",
        minimum=0,
        values="integer, between 0 and `max_tokens`",
        at_most_max_tokens=True,
    )
    held_back_token_ids: tuple[int, ...] = ()
    """Not drawn before there are `min_tokens` outputs. The tokenizer puts in whatever ends the sequence."""


@attrs.frozen
class SamplingParams:
    """How the tokens of one sequence are drawn. Checked by the web layer, never again below it."""

    max_tokens: int
    """Output tokens at most, at least 1."""
    temperature: float = sampling_field(
        1.0, "0 is greedy", apis=EVERY_API, minimum=0, maximum=2, messages_bounds=Bounds(minimum=0, maximum=1)
    )
    top_p: float = sampling_field(
        1.0, "the likeliest tokens whose probabilities add up to this are kept", apis=EVERY_API, above=0, maximum=1
    )
    top_k: int = sampling_field(
        0,
        "number of the likeliest tokens that are kept",
        apis=EVERY_API,
        minimum=-1,
        messages_bounds=Bounds(minimum=0),
        same_as_off=-1,
        is_clamped=True,
    )
    min_p: float = sampling_field(
        0.0, "tokens less likely than this share of the likeliest one's probability are dropped", minimum=0, maximum=1
    )
    seed: int = sampling_field(
        0,
        "with the output's position, all that a draw depends on; see below",
        apis=EVERY_API,
        reader="seed",
        minimum=-(2**63),
        maximum=2**64 - 1,
        values="64 bits, signed or not",
    )
    """64 bits; with the output's position it keys Philox."""
    stop_token_ids: tuple[int, ...] = sampling_field(
        (),
        "end the choice when drawn; counted in the completion, not shown",
        reader="token_ids",
        max_length=256,
        values="up to 256 token ids",
        off=([],),
    )
    ignore_eos: bool = sampling_field(False, "end-of-sequence tokens do not end the choice", apis=EVERY_API)
    logprobs: int | None = None
    """How many of the likeliest tokens are told beside each drawn one and its logprob. None: nothing is told."""
    prompt_logprobs: int | None = None
    """The same of every prompt token but the first."""
    rules: LogitRules | None = None
    """None, as nearly always: logits are drawn from as they are."""


SAMPLING_FIELDS = (*sampling_fields_of(SamplingParams), *sampling_fields_of(LogitRules))
"""All that clients can send."""
