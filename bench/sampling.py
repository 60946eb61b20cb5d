"""Compare the sampler and the logprobs in C with torch's, on the same logits in the same run.

    python -m bench.sampling [--json] [--quick] [--rows 64] [--rounds 5] [--flat]

Logits fall with the logarithm of their rank, as a model's do, by 1.5 per e-fold. `--flat` uses normal values with
standard deviation 3 instead, in which thousands of tokens matter: the hard case. The torch side is the straightforward
implementation: argmax, or the filters, softmax and a draw; log-softmax, ranks and top tokens; all rows at once. Numbers
are the best of the rounds, per row.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.timing import best_s
from quipu.kernels.batch import StepBatch
from quipu.kernels.cpu.build import load
from quipu.kernels.cpu.instruction_sets import choose_instruction_set, processor_flags
from quipu.kernels.cpu.sampler import decided, draw
from quipu.kernels.cpu.scores import score
from quipu.kernels.step_types import RowSampling

VOCABULARY = 151_936
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "unfiltered": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
}
LIKELIEST = (0, 5, 20)


def make_batch(rows: int, settings: dict[str, Any]) -> StepBatch:
    return StepBatch(
        slots=list(range(rows)),
        query_start=list(range(rows + 1)),
        positions=[0] * rows,
        token_ids=[0] * rows,
        block_tables=[[1]] * rows,
        samples=[True] * rows,
        sampling=[RowSampling(**{"temperature": 1.0, **settings, "seed": row}) for row in range(rows)],
    )


def torch_way(logits_MV: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    if settings.get("temperature") == 0:
        return logits_MV.argmax(-1)
    if "top_k" in settings:
        top_MK, ids_MK = logits_MV.topk(settings["top_k"])
        probabilities_MK = cut(top_MK.softmax(-1), settings.get("top_p", 1.0))
        return ids_MK.gather(1, probabilities_MK.multinomial(1))
    if "top_p" in settings:
        sorted_MV, ids_MV = logits_MV.sort(-1, descending=True)
        return ids_MV.gather(1, cut(sorted_MV.softmax(-1), settings["top_p"]).multinomial(1))
    probabilities_MV = logits_MV.softmax(-1)
    if "min_p" in settings:
        least = settings["min_p"] * probabilities_MV.amax(-1, keepdim=True)
        probabilities_MV = probabilities_MV.masked_fill(probabilities_MV < least, 0)
    return (probabilities_MV / torch.empty_like(probabilities_MV).exponential_()).argmax(-1)


def cut(sorted_MK: torch.Tensor, top_p: float) -> torch.Tensor:
    return sorted_MK.masked_fill(sorted_MK.cumsum(-1) - sorted_MK >= top_p, 0)


def torch_scores(logits_MV: torch.Tensor, ids_M: torch.Tensor, num_top: int) -> list[Any]:
    logits_M1, logprobs_MV = logits_MV.gather(1, ids_M[:, None]), logits_MV.log_softmax(-1)
    ranks_M = (logits_MV > logits_M1).sum(-1) + 1
    top_MK, top_ids_MK = logprobs_MV.topk(num_top)
    logprobs_M1 = logprobs_MV.gather(1, ids_M[:, None])
    return [tensor.tolist() for tensor in (logprobs_M1, ranks_M, top_ids_MK, top_MK)]


def make_logits(rows: int, *, flat: bool) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(1)
    if flat:
        return rng.normal(0, 3, (rows, VOCABULARY)).astype(np.float32)
    ranked = -1.5 * np.log(np.arange(1, VOCABULARY + 1))
    return np.stack([rng.permutation(ranked) for _ in range(rows)]).astype(np.float32)


def measure(rows: int, rounds: int, *, flat: bool) -> list[dict[str, Any]]:
    library = load(choose_instruction_set(processor_flags()))
    logits = make_logits(rows, flat=flat)
    logits_MV, threads = torch.from_numpy(logits), torch.get_num_threads()
    results = []
    for name, settings in SETTINGS.items():
        batch = make_batch(rows, settings)
        sure = decided(library, batch, range(rows), logits, num_threads=threads)
        ours = best_s(partial(draw, library, batch, range(rows), logits, num_threads=threads), rounds)
        theirs = best_s(partial(torch_way, logits_MV, settings), rounds)
        results.append(
            {
                "name": name,
                "quipu_us": ours / rows * 1e6,
                "torch_us": theirs / rows * 1e6,
                "ratio": theirs / ours,
                "by_the_oracle": sure.count(None),
            }
        )
    return results


def measure_scores(rows: int, rounds: int, *, flat: bool) -> list[dict[str, Any]]:
    """Measure the logprobs of the token that each row would draw."""
    library = load(choose_instruction_set(processor_flags()))
    logits, threads = make_logits(rows, flat=flat), torch.get_num_threads()
    drawn = draw(library, make_batch(rows, {}), range(rows), logits, num_threads=threads)
    token_ids = [token_id for token_id in drawn if token_id is not None]  # all of them: the logits are finite
    logits_MV, ids_M = torch.from_numpy(logits), torch.tensor(token_ids)
    results = []
    for count in LIKELIEST:
        counts = [count] * rows
        ours = best_s(partial(score, library, logits, range(rows), token_ids, counts, num_threads=threads), rounds)
        theirs = best_s(partial(torch_scores, logits_MV, ids_M, count), rounds)
        name = f"logprob, {count} likeliest"
        results.append(
            {"name": name, "quipu_us": ours / rows * 1e6, "torch_us": theirs / rows * 1e6, "ratio": theirs / ours}
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sampling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: two rows, one round")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flat", action="store_true", help="logits in which thousands of tokens matter")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.rounds = 2, 1
    results = [
        *measure(arguments.rows, arguments.rounds, flat=arguments.flat),
        *measure_scores(arguments.rows, arguments.rounds, flat=arguments.flat),
    ]
    if arguments.json:
        print(json.dumps({"rows": results}))
        return
    print(f"{'us a row of ' + str(VOCABULARY):24} {'quipu':>8} {'torch':>8} {'ratio':>7}")
    for row in results:
        print(f"{row['name']:24} {row['quipu_us']:8.0f} {row['torch_us']:8.0f} {row['ratio']:6.1f}x")


if __name__ == "__main__":
    main()
