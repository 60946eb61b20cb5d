"""The settings of speculative decoding. Part of `engine_config.py`, on top of those of tiers."""

from __future__ import annotations

import attrs

from .declarations import setting
from .tier_settings import TierSettings

MAX_DEPTH = 32


@attrs.frozen(kw_only=True)
class SpeculativeSettings(TierSettings):
    speculative: str = setting(
        "off",
        "--speculative",
        choices=("off", "ngram", "suffix"),
        help="verify several guessed tokens in one step: `ngram` guesses what followed the same tokens earlier in the "
        "sequence, `suffix` also what followed them in recent outputs of the same tenant "
        "(docs/operate/speculative-decoding.md)",
        group="speculation",
        resolved="suffix with --executor auto, cpu or triton, where text is generated; else off",
    )
    num_speculative_tokens: int = setting(
        16,
        "--num-speculative-tokens",
        minimum=1,
        maximum=MAX_DEPTH,
        metavar="N",
        help="maximum number of guessed tokens of one sequence in a step",
        group="speculation",
    )
    speculative_costs: tuple[tuple[int, float], ...] | None = setting(
        None,
        "--speculative-costs",
        reader="pass_costs",
        metavar="TOKENS:COST,...",
        help="what a step of so many tokens costs, in any unit, from which the number of guesses follows; "
        "by default measured when an engine starts",
        resolved="measured",
        group="speculation",
    )
    speculative_kv_cost: float = setting(
        0.0,
        "--speculative-kv-cost",
        minimum=0,
        maximum=1_000_000_000,
        metavar="COST",
        help="with --speculative-costs, what it costs in addition if a token reads the KV of 1,000 others",
        group="speculation",
    )
    draft_model: str | None = setting(
        None,
        "--draft-model",
        metavar="MODEL",
        help="a smaller model with the same vocabulary, as for --model, which guesses where no earlier text does; its "
        "weights and its KV cache take memory beside the model's (docs/operate/speculative-decoding.md)",
        group="speculation",
    )
    draft_model_costs: tuple[tuple[int, float], ...] | None = setting(
        None,
        "--draft-model-costs",
        reader="pass_costs",
        metavar="TOKENS:COST,...",
        help="with --speculative-costs, what a pass of the draft model over so many tokens costs, in the same unit",
        resolved="measured",
        group="speculation",
    )
