"""Sampling parameters. Created by `web/`, completed by the tokenizer, applied by the backends.

Each field that clients can send is declared here: what every API reads and refuses, and the table in
`docs/use/sampling.md`, follow from the declaration. In the code, only the backends that apply a field name it again.
"""

from __future__ import annotations

import attrs

from quipu.kernels.step_types import LogitRules as LogitRules
from quipu.kernels.step_types import RowSampling

from ..config.declarations import EVERY_API, Bounds, declare, sampling_field, sampling_fields_of, sampling_rule

declare(
    LogitRules,
    presence_penalty=sampling_rule(
        "subtracted from the logit of each token that has been generated", minimum=-2, maximum=2, is_portable=True
    ),
    frequency_penalty=sampling_rule(
        "subtracted from a token's logit once for each time it has been generated",
        minimum=-2,
        maximum=2,
        is_portable=True,
    ),
    repetition_penalty=sampling_rule(
        "divides the positive and multiplies the negative logits of tokens in the prompt or the output",
        above=0,
        from_checkpoint=True,
    ),
    bias=sampling_rule(
        "added to the logits of these tokens; an empty object changes nothing",
        name="logit_bias",
        reader="biases",
        minimum=-100,
        maximum=100,
        max_length=1024,
        values="up to 1024 pairs of a token id and a number between -100 and 100",
        off=({},),
    ),
    allowed_token_ids=sampling_rule(
        "only these tokens are sampled", reader="some_token_ids", values="a non-empty list of token ids", off=()
    ),
    bad_words=sampling_rule(
        "never appear in the output",
        reader="words",
        max_length=256,
        values="up to 256 words of up to 256 characters, not all white space",
        off=([],),
    ),
    min_tokens=sampling_rule(
        "number of tokens to generate before a token may end the choice (EOS, `stop_token_ids`) or complete a stop "
        "string",
        minimum=0,
        values="integer, between 0 and `max_tokens`",
        at_most_max_tokens=True,
    ),
)


@attrs.frozen
class OutputGrammar:
    """A grammar that has been checked, and where it begins."""

    text: str
    """As the grammar library reads it (`grammars/grammar_library.py`)."""
    reasoning_opening_ids: tuple[int, ...] = ()
    """With these the output may begin, and is then reasoning. Empty: it is not."""
    reasoning_closing_ids: tuple[int, ...] = ()
    """Reasoning ends with these. Not empty if it may be opened, or is."""
    prompt_opens_reasoning: bool = False
    """The first output is reasoning already."""
    tenant: str = ""
    """Whose it is, for turns and limits."""
    owner: str = ""
    """Who may share what is compiled of it: a tenant, and a cache salt within it."""


@attrs.frozen
class SamplingParams(RowSampling):
    """How the tokens of one sequence are sampled. Validated by the web layer, and not again below it.

    What the backends read of it is `RowSampling`, whose fields are declared for clients here.
    """

    max_tokens: int
    """Maximum number of output tokens, at least 1."""
    temperature: float = sampling_field(
        1.0,
        "0 is greedy",
        apis=EVERY_API,
        minimum=0,
        maximum=2,
        messages_bounds=Bounds(minimum=0, maximum=1),
        from_checkpoint=True,
        is_portable=True,
    )
    top_p: float = sampling_field(
        1.0,
        "keeps the most likely tokens whose probabilities add up to this; 0 is greedy",
        apis=EVERY_API,
        minimum=0,
        maximum=1,
        from_checkpoint=True,
        is_portable=True,
    )
    top_k: int = sampling_field(
        0,
        "keeps this many of the most likely tokens",
        apis=EVERY_API,
        minimum=-1,
        messages_bounds=Bounds(minimum=0),
        same_as_off=-1,
        is_clamped=True,
        from_checkpoint=True,
    )
    min_p: float = sampling_field(
        0.0,
        "drops tokens less likely than this share of the most likely token's probability",
        minimum=0,
        maximum=1,
        from_checkpoint=True,
    )
    seed: int = sampling_field(
        0,
        "the random number of an output depends on the seed and the output's position alone",
        apis=EVERY_API,
        reader="seed",
        minimum=-(2**63),
        maximum=2**64 - 1,
        values="64 bits, signed or unsigned",
    )
    """64 bits. The key of Philox, together with the output's position."""
    stop_token_ids: tuple[int, ...] = sampling_field(
        (),
        "end the choice when sampled; counted in the completion, but not shown",
        reader="token_ids",
        max_length=256,
        values="up to 256 token ids",
        off=([],),
    )
    ignore_eos: bool = sampling_field(False, "end-of-sequence tokens do not end the choice", apis=EVERY_API)
    logprobs: int | None = None
    """How many of the most likely tokens to report with each sampled token and its logprob. None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""
    rules: LogitRules | None = None
    """None, as in most requests: the logits are not changed."""
    grammar: OutputGrammar | None = None
    """What the output, after its reasoning, has to match, filled in by the tokenizer."""
    prediction: tuple[int, ...] = ()
    """Tokens that the client expects the output to have, as drafts, filled in by the tokenizer."""
    dimensions: int | None = None
    """How many elements an embedding has. None: all."""


SAMPLING_FIELDS = (*sampling_fields_of(SamplingParams), *sampling_fields_of(LogitRules))
"""All fields that clients can send."""
