"""`kernels/sampling/logprobs.py`, and the reference's logprobs compared with transformers'."""

from __future__ import annotations

import random
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quipu.kernels.backend import Backend
from quipu.kernels.batch import Drawn, Scoring
from quipu.kernels.sampling.logprobs import likeliest, rank, score
from quipu.kernels.step_types import Scores
from tests.kernels.family_configs import VOCAB_SIZE
from tests.kernels.kernel_checkpoints import FEW, make_backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

LENGTH = 140
NUM_TOP = 20
TOKENS = prompt(LENGTH, seed=31)


def test_values_against_float64() -> None:
    """Match the definition of a logprob (logit minus log-sum-exp) in float64, with large logits too."""
    logits = torch.randn(5, 1000) * 30 + 500
    scores = score(logits, [7, 0, 999, 500, 3], [3] * 5)
    exact = logits.double() - torch.logsumexp(logits.double(), -1, keepdim=True)
    for row, (target, logprob) in enumerate(zip(scores.token_ids, scores.logprobs, strict=True)):
        assert logprob == pytest.approx(exact[row, target].item(), abs=1e-4)
        ids = np.lexsort((np.arange(1000), -logits[row].numpy()))
        assert scores.top_ids[row] == ids[:3].tolist()
        assert scores.ranks[row] == ids.tolist().index(target) + 1
        assert scores.top_logprobs[row] == pytest.approx(exact[row, ids[:3]].tolist(), abs=1e-4)


@pytest.mark.parametrize("seed", range(20))
def test_ties_go_to_the_lower_id(seed: int) -> None:
    """Order equal logits by id, both in the top ids and in ranks."""
    draw = random.Random(seed)
    logits = torch.tensor([float(draw.randrange(4)) for _ in range(300)])
    order = sorted(range(300), key=lambda i: (-logits[i].item(), i))
    for count in (0, 1, 2, 20, 300, 400):
        assert likeliest(logits, count) == order[:count]
    assert [rank(logits, token_id) for token_id in order] == list(range(1, 301))


def test_nan_raises_and_banned_tokens_score_minus_infinity() -> None:
    """Raise for a row with NaN, as sampling does; give a banned token a logprob of minus infinity."""
    with pytest.raises(ArithmeticError):
        score(torch.tensor([[0.0, float("nan")]]), [0], [1])
    with pytest.raises(ArithmeticError):
        score(torch.full((1, 4), -float("inf")), [0], [1])
    masked = score(torch.tensor([[0.0, -float("inf")]]), [1], [1])
    assert masked == Scores([1], [-float("inf")], [2], [[0]], [[0.0]])


def drawn_and_prompt(backend: Backend, chunks: list[int], others: int, seed: int) -> tuple[Scores, Scores]:
    """Return the scores of the sampled token and of TOKENS, prefilled in chunks together with `others` rows."""
    tables = scattered_blocks(10 + 4 * others, seed=seed)
    whole = Scores.empty()
    position = 0
    for size in chunks:
        rows = [
            {"slot": i + 1, "token_ids": prompt(3 + i, seed=i), "position": 0, "blocks": tables[10 + 4 * i :][:4]}
            for i in range(others)
        ]
        is_last = position + size == LENGTH
        mine = {"token_ids": TOKENS[position : position + size], "position": position, "blocks": tables[:10]}
        index = len(rows) // 2
        batch = make_batch(*rows[:index], {**mine, "slot": 0, "samples": is_last}, *rows[index:])
        start = batch.query_start[index]
        targets = TOKENS[position + 1 : position + size + 1]
        scoring = Scoring(
            drawn_rows=[index] if is_last else [],
            drawn_num_top=[NUM_TOP] if is_last else [],
            prompt_tokens=list(range(start, start + len(targets))),
            prompt_target_ids=targets,
            prompt_num_top=[NUM_TOP] * len(targets),
        )
        drawn = backend.step(attrs.evolve(batch, scoring=scoring))
        assert drawn.scores is not None and drawn.prompt_scores is not None
        whole.extend(drawn.prompt_scores)
        position += size
    assert drawn.scores is not None
    return drawn.scores, whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FEW)
def test_matches_transformers(checkpoints: dict[str, Path], name: str, dtype: str) -> None:
    """Match transformers' logprobs of prompt and sampled tokens, teacher-forced; in bfloat16 approximately."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints[name], dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        theirs = torch.log_softmax(model(torch.tensor([TOKENS])).logits[0].float(), -1)
    drawn, scored = drawn_and_prompt(make_backend(checkpoints[name], dtype=dtype), [LENGTH], 0, seed=1)
    everything = Scores.empty()
    everything.extend(scored)
    everything.extend(drawn)
    assert everything.token_ids == [*TOKENS[1:], drawn.token_ids[0]]
    spread = theirs.std().item()
    mean, worst = (1e-5, 1e-4) if dtype == "float32" else (0.04, 0.3)
    gaps = [
        abs(ours - theirs[at, token_id].item()) / spread
        for at in range(LENGTH)
        for token_id, ours in zip(
            [everything.token_ids[at], *everything.top_ids[at]],
            [everything.logprobs[at], *everything.top_logprobs[at]],
            strict=True,
        )
    ]
    print(name, dtype, "mean", np.mean(gaps), "worst", max(gaps))
    assert np.mean(gaps) <= mean and max(gaps) <= worst
    assert drawn.ranks == [1] and drawn.top_ids[0][0] == drawn.token_ids[0], (
        "greedy sampling must take the most likely token"
    )
    if dtype == "float32":
        assert [ids[0] for ids in everything.top_ids] == theirs.argmax(-1).tolist()
        for at, logprob in enumerate(everything.logprobs):
            assert everything.ranks[at] == pytest.approx(1 + int((theirs[at] > logprob + 1e-4).sum()), abs=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FEW)
def test_same_bits_in_any_batch(checkpoints: dict[str, Path], name: str, dtype: str) -> None:
    """Return the same logprobs and ranks to the bit, alone, in chunks and with 30 other rows."""
    backend = make_backend(checkpoints[name], dtype=dtype, max_num_seqs=40)
    alone = drawn_and_prompt(backend, [LENGTH], 0, seed=2)
    backend.cache.fill(float("nan"))
    assert drawn_and_prompt(backend, [33, 1, 70, 36], 0, seed=3) == alone
    backend.cache.fill(float("nan"))
    assert drawn_and_prompt(backend, [50, 90], 30, seed=4) == alone


def test_scoring_does_not_change_sampling(checkpoints: dict[str, Path]) -> None:
    """Sample the same tokens as without scoring; a pass without scoring returns no scores."""
    row = {"token_ids": TOKENS, "position": 0, "blocks": scattered_blocks(10, seed=1), "temperature": 1.0, "seed": 5}
    batch = make_batch(row)
    plain = make_backend(checkpoints["llama"]).step(batch)
    assert plain == Drawn(rows=[0], token_ids=plain.token_ids)
    scoring = Scoring([0], [VOCAB_SIZE + 1], [], [], [])
    scored = make_backend(checkpoints["llama"]).step(attrs.evolve(batch, scoring=scoring))
    assert scored.token_ids == plain.token_ids
    assert scored.scores is not None and sorted(scored.scores.top_ids[0]) == list(range(VOCAB_SIZE))
    assert sum(np.exp(scored.scores.top_logprobs[0])) == pytest.approx(1)
