"""What vLLM's runners expect of a sampler: the drawn tokens, in the runner's order of rows.

`logit_sampler.py` and `device_sampler.py` make them for rank 0, `followed_samplers.py` for the ranks that follow.

What must always hold: a row that draws nothing yields no token, so that the runner adds none to its request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_NO_TOKEN = -1  # vLLM's PLACEHOLDER_TOKEN_ID


def output_of_v1(order: Sequence[int], rows: list[int], token_ids: list[int], device: torch.device) -> Any:
    """Return the tokens of these rows of the step."""
    from vllm.v1.outputs import SamplerOutput

    if len(rows) == len(order):
        ids_M1 = torch.tensor([[token_ids[row]] for row in order], dtype=torch.int32)
        return SamplerOutput(sampled_token_ids=ids_M1.to(device), logprobs_tensors=None)
    # two columns, because a row of these may yield no token at all
    ids_M2 = torch.full((len(order), 2), _NO_TOKEN, dtype=torch.int32)
    if rows:
        place_of = {row: place for place, row in enumerate(order)}
        ids_M2[[place_of[row] for row in rows], 0] = torch.tensor(token_ids, dtype=torch.int32)
    return SamplerOutput(sampled_token_ids=ids_M2.to(device), logprobs_tensors=None)


def output_of_v2(order: Sequence[int], samples: Sequence[bool], ids_R: torch.Tensor) -> Any:
    """Return the tokens of the rows that sample; `ids_R` are on the device, in the runner's order."""
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    num_sampled_R = torch.tensor([int(samples[row]) for row in order], dtype=torch.int32)
    if ids_R.is_cuda:
        num_sampled_R = num_sampled_R.pin_memory()
    return SamplerOutput(
        sampled_token_ids=ids_R[:, None],
        logprobs_tensors=None,
        num_nans=None,
        num_sampled=num_sampled_R.to(ids_R.device, non_blocking=True),
        num_rejected=torch.zeros(len(order), dtype=torch.int32, device=ids_R.device),
    )


def share_tokens(ids_R: torch.Tensor, num_ranks: int) -> None:
    """Give every rank the tokens of rank 0, on the device. All ranks must call it, with tokens for as many rows."""
    if num_ranks > 1:
        from vllm.distributed.parallel_state import get_tp_group

        get_tp_group().broadcast(ids_R)
