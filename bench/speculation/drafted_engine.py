"""What drafts are worth in the shape of Qwen3-0.6B with dummy weights, beside the same engine without.

Dummy weights repeat nothing of use, so what is drafted is what the engine without drafts has drawn, with wrong tokens
as often as drafts of the demo model are wrong, in as many of its steps as have drafts. How many are verified is decided
as always, and texts are searched as always, for what that costs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import attrs

from bench.driven_engine import DrivenEngine, Served, running
from bench.shapes import QWEN3_06B as SHAPE
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.executor.acceptance import Kind, Place, Source
from quipu.actors.engine.executor.draft_lookup import MAX_MATCH, Tokens
from quipu.actors.engine.executor.draft_search import Draft
from quipu.actors.engine.executor.drafter import Drafter
from quipu.actors.engine.executor.model_drafts import ModelDrafts
from quipu.actors.engine.executor.sequence_drafts import SequenceDrafts
from quipu.actors.engine.executor.sequence_state import SequenceState

from .replaying_model import DRAFT_SHAPE, ReplayingModel

PROMPT_TOKENS = 128
FIRST = Kind.of(Source.PROMPT, Place.NEXT, MAX_MATCH, 1, 1)
FURTHER = FIRST.of_further(1, 1)
"""How tokens of a draft are said to have been found."""
RANDOM = "random"
"""Text in which nothing repeats, as `suffix` finds drafts in it."""


class ReplayingDrafter(Drafter):
    """Drafts what a sequence is known to draw, and wrong tokens at given rates."""

    def __init__(self, drafter: Drafter, rates: Sequence[float], known: Sequence[Sequence[int]]) -> None:
        """`rates`: as `Found.rates` returns them. `known`: prompts with the outputs that follow them."""
        super().__init__(
            max_depth=drafter.max_depth, max_tokens=drafter.max_tokens, shares_outputs=False, costs=drafter.costs
        )
        self._rates = rates
        self._known = {tuple(tokens[:PROMPT_TOKENS]): list(tokens) for tokens in known}
        self._random = Random(1)

    def _find(
        self, drafts: SequenceDrafts, recent: Tokens | None, state: SequenceState, most: int, num_searches: int
    ) -> Draft:
        super()._find(drafts, recent, state, most, num_searches)
        is_there, *rates = self._rates or [0.0]
        if self._random.random() >= is_there:
            return Draft([], [])
        known = self._known[tuple(state.tokens[:PROMPT_TOKENS])]
        draft = known[len(state.tokens) : len(state.tokens) + most]
        for at, rate in enumerate((*rates, *[0.0] * most)[: len(draft)]):
            if self._random.random() >= rate:
                draft[at] ^= 1
        return Draft(draft, [FIRST, *[FURTHER] * (len(draft) - 1)][: len(draft)])


@attrs.frozen
class Gain:
    num_streams: int
    name: str
    ratio: float
    """Tokens a second with drafts, divided by those without: the median of pairs, in which they take turns."""
    lowest: float
    tokens_a_pass: float
    num_plain_a_s: float


def config_of(folder: Path, num_streams: int, num_tokens: int, speculative: str, **more: Any) -> EngineConfig:
    length = PROMPT_TOKENS + num_tokens
    blocks_each = -(-length // 16) + 3
    return EngineConfig(
        model_path=str(folder),
        load_format="dummy",
        executor="cpu",
        block_size=16,
        num_blocks=num_streams * blocks_each + 1,
        max_num_seqs=num_streams,
        max_num_batched_tokens=512,
        max_model_len=length + 16,
        eos_token_ids=(),
        watermark=0.0,
        speculative=speculative,
        **more,
    )


async def measure_model_gains(
    num_streams: int, num_tokens: int, num_rounds: int, rates: Sequence[float], shape: dict[str, object]
) -> list[Gain]:
    """Serve streams with a draft model and without, by turns, for each rate at which its tokens are right."""
    random = Random(num_streams)
    with tempfile.TemporaryDirectory() as name:
        folder, draft = Path(name) / "model", Path(name) / "draft"
        for path, entries in ((folder, SHAPE | shape), (draft, SHAPE | DRAFT_SHAPE | shape)):
            path.mkdir()
            (path / "config.json").write_text(json.dumps(entries))
        vocab_size = int(str((SHAPE | shape)["vocab_size"]))
        prompts = [[random.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_streams)]
        with_model = config_of(folder, num_streams, num_tokens, "ngram", draft_model=str(draft))
        async with (
            running(config_of(folder, num_streams, num_tokens, "off")) as plain,
            running(with_model) as drafting,
        ):
            drafter = drafting.engine.executor.drafter
            assert isinstance(drafter, Drafter) and drafter.model is not None
            model = drafter.model.model
            outputs = [one.token_ids for one in await plain.ask(*prompts, max_tokens=num_tokens)]
            await drafting.ask(*prompts, max_tokens=num_tokens)
            known = {tuple(prompt): prompt + output for prompt, output in zip(prompts, outputs, strict=True)}
            gains = []
            for rate in rates:
                drafting.engine.executor.drafter = Drafter(
                    max_depth=drafter.max_depth,
                    max_tokens=drafter.max_tokens,
                    shares_outputs=False,
                    costs=drafter.costs,
                    model=ModelDrafts(ReplayingModel(model, rate, known)),
                )
                name = f"draft model, right {rate:.0%}"
                gains.append(await _compare(name, plain, drafting, prompts, num_tokens, num_rounds, 0.0))
    return gains


async def measure_gains(
    num_streams: int, num_tokens: int, num_rounds: int, rates: dict[str, list[float]], shape: dict[str, object]
) -> list[Gain]:
    """Serve streams with and without drafts, by turns, for each kind of text that has rates; random text has none."""
    random = Random(num_streams)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE | shape))
        vocab_size = int(str((SHAPE | shape)["vocab_size"]))
        prompts = [[random.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_streams)]

        def config(speculative: str) -> EngineConfig:
            return config_of(folder, num_streams, num_tokens, speculative)

        async with running(config("off")) as plain, running(config("suffix")) as drafting:
            drafter = drafting.engine.executor.drafter
            assert isinstance(drafter, Drafter)
            outputs = [one.token_ids for one in await plain.ask(*prompts, max_tokens=num_tokens)]
            await drafting.ask(*prompts, max_tokens=num_tokens)
            known = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
            gains = []
            for kind, of_kind in rates.items():
                replays = kind != RANDOM
                drafting.engine.executor.drafter = ReplayingDrafter(drafter, of_kind, known) if replays else drafter
                temperature = 0.0 if replays else 1.0
                gains.append(await _compare(kind, plain, drafting, prompts, num_tokens, num_rounds, temperature))
    return gains


async def _compare(
    name: str,
    plain: DrivenEngine,
    drafting: DrivenEngine,
    prompts: list[list[int]],
    num_tokens: int,
    num_rounds: int,
    temperature: float,
) -> Gain:
    ratios, rates, passes = [], [], []
    for at in range(num_rounds):
        # another seed each time: what a round says again, `suffix` would find in the outputs of an earlier one
        ask = partial(DrivenEngine.ask, max_tokens=num_tokens, temperature=temperature, seed=at * len(prompts))
        first, second = (plain, drafting) if at % 2 == 0 else (drafting, plain)
        served = {first: await ask(first, *prompts), second: await ask(second, *prompts)}
        without, with_drafts = served[plain], served[drafting]
        assert [one.token_ids for one in without] == [one.token_ids for one in with_drafts], "drafts changed a text"
        rates.append(_tokens_a_s(without))
        ratios.append(_tokens_a_s(with_drafts) / rates[-1])
        passes.append(num_tokens / statistics.mean(one.num_token_times for one in with_drafts))
    return Gain(len(prompts), name, statistics.median(ratios), min(ratios), statistics.mean(passes), max(rates))


def _tokens_a_s(served: list[Served]) -> float:
    """Return the tokens a second of all streams, from the last stream's first token on."""
    start, end = max(one.first_token_s for one in served), max(one.end_s for one in served)
    return sum(sum(at > start for at in one.token_s) for one in served) / (end - start)
