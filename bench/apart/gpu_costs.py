"""What a step and a transfer cost in virtual time: a GPU's arithmetic and memory in five numbers, and a link's in two.

Used by `bench/apart`. The defaults resemble one H100 with a model of 8 billion parameters in 16 bits, 32 layers, and 8
heads of keys and values of 128 elements, at a third to four fifths of what its data sheet promises:

    step = launch + the longer of (weights, token * positions) + context * tokens that decoding rows read
           + pair * (positions of a prompt, each times the tokens before it)

Weights are read once a step, whatever it computes, so that the first 200 positions of a step cost nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from quipu.actors.messages.executor import StepPlan


@attrs.frozen
class GpuCosts:
    launch_s: float = 0.001
    """Of a step, whatever it computes."""
    weights_s: float = 0.006
    """To read the weights: 16 GB at 2.7 TB/s."""
    token_s: float = 30e-6
    """To multiply a position with the weights: 16 GFLOP at 530 TFLOP/s."""
    context_s: float = 50e-9
    """To read a token's keys and values for a row that decodes: 128 KiB at 2.7 TB/s."""
    pair_s: float = 1.5e-9
    """Attention of a prompt's position to one before it: 0.5 MFLOP at 350 TFLOP/s."""
    kv_bytes: int = 2 * 32 * 8 * 128 * 2
    """Of a token."""

    def seconds(self, plan: StepPlan, positions: Mapping[int, int]) -> float:
        """Return how long a step takes. `positions`: how far its sequences are."""
        going_on = plan.row_ids[: plan.num_going_on]
        num_read = sum(map(positions.__getitem__, going_on))
        num_positions, num_pairs = plan.num_going_on, 0.0
        for start, count in zip(plan.chunk_starts, plan.chunk_counts, strict=True):
            num_positions += count
            if count == 1:
                num_read += start
            else:
                num_pairs += count * (start + count / 2)
        multiplying_s = max(self.weights_s, self.token_s * num_positions)
        return self.launch_s + multiplying_s + self.context_s * num_read + self.pair_s * num_pairs


@attrs.frozen
class LinkCosts:
    """The way from one engine to others: each engine has one in each direction, which transfers take in turn."""

    bytes_per_s: float = 25e9
    """As PCI Express 5 through the host's memory, or half of a 400 Gb/s network."""
    delay_s: float = 0.001
    """From the end of a copy until the other side knows of it. Also of messages by way of the web process."""
