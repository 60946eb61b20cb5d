"""`TritonBackend` on the interpreter: the reference's logits and tokens, however a pass is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from quipu.actors.engine.executor.loading import backend_config_of
from quipu.kernels.batch import Pooling, Scoring, StepBatch
from quipu.kernels.draft_rows import ExpandedBatch
from quipu.kernels.logit_processors import LogitProcessor, Processing
from quipu.kernels.reference.reference_backend import ReferenceBackend
from quipu.kernels.step_types import LogitRules
from quipu.kernels.triton.triton_backend import TritonBackend
from tests.kernels.family_configs import CONFIGS, VOCAB_SIZE
from tests.kernels.kernel_checkpoints import backend_config, make_backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks
from tests.runtimes import runtime_config
from tests.triton_kernels.interpreter import SMALL, CpuDevice

TOKENS = prompt(40, seed=3)
BLOCKS = scattered_blocks(3, seed=1)
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 48}


class CountingDevice(CpuDevice):
    """Counts the graphs that are captured."""

    def __init__(self) -> None:
        self.num_captured = 0

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.num_captured += 1
        return super().capture(work)


def make_triton(model_path: Path, device: CpuDevice | None = None, **changes: Any) -> TritonBackend:
    """Make a backend whose cache is filled with NaN, so that reading an unwritten slot is detected."""
    backend = TritonBackend(backend_config(model_path, **(SIZES | changes)), device or CpuDevice(), SMALL)
    backend.cache.fill(float("nan"))
    return backend


def row(index: int, **more: Any) -> dict[str, Any]:
    """Return a row of a prompt of four tokens, in its own slot and block."""
    return {"slot": index, "token_ids": prompt(4, seed=index), "position": 0, "blocks": [5 + index], **more}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_the_reference(checkpoints: dict[str, Path], name: str) -> None:
    """Match the reference for every family: two chunks of a prompt, then a decoded token, each beside another row."""
    ours, theirs = make_triton(checkpoints[name]), make_backend(checkpoints[name])
    for start, end in ((0, 9), (9, 20), (20, 21)):
        mine = {"token_ids": TOKENS[start:end], "position": start, "blocks": BLOCKS, "slot": 1}
        batch = make_batch(row(0, token_ids=prompt(1, seed=9)), mine)
        wanted = list(range(1 + end - start))
        torch.testing.assert_close(ours.logits(batch, wanted), theirs.logits(batch, wanted), atol=1e-4, rtol=0)


def test_blocks_are_moved(checkpoints: dict[str, Path]) -> None:
    """A prompt goes on from blocks that another backend has computed, by way of the host, with the same bits."""
    # with a window, else blocks in another order would give the same bits: sums of two parts
    first, second = make_triton(checkpoints["gemma2"]), make_triton(checkpoints["gemma2"])
    first.logits(make_batch({"token_ids": TOKENS[:32], "position": 0, "blocks": BLOCKS}), [])
    host, others = first.allocate_on_host(2), [7, 8, 9]
    first.read_blocks(BLOCKS[:2], host)
    second.write_blocks(others[:2], host)
    rest = {"token_ids": TOKENS[32:], "position": 32}
    stayed, moved = make_batch({**rest, "blocks": BLOCKS}), make_batch({**rest, "blocks": others})
    assert torch.equal(second.logits(moved, [0, 7]), first.logits(stayed, [0, 7]))


def test_other_kv_cache_dtypes_are_refused(checkpoints: dict[str, Path]) -> None:
    """Keep keys and values in the weights' dtype only; refuse another by the flag's name."""
    backend = make_triton(checkpoints["llama"], kv_cache_dtype="float32")
    assert backend.capabilities.kv_cache_dtype == "float32"
    with pytest.raises(ValueError, match="--kv-cache-dtype int8: the triton executor keeps"):
        make_triton(checkpoints["llama"], kv_cache_dtype="int8")


def test_copied_block(checkpoints: dict[str, Path]) -> None:
    """Read a block that was copied in the same pass."""
    ours, theirs = make_triton(checkpoints["llama"]), make_backend(checkpoints["llama"])
    whole = make_batch({"token_ids": TOKENS[:16], "position": 0, "blocks": [7]})
    expected = theirs.logits(whole, [15])
    ours.logits(whole, [])
    last = make_batch({"token_ids": TOKENS[15:16], "position": 15, "blocks": [9]})
    found = ours.logits(attrs.evolve(last, copies=[(7, 9)]), [0])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def generate(backend: TritonBackend | ReferenceBackend, *, carried: bool) -> list[list[int]]:
    """Generate three tokens for each of two rows, one greedy and one sampled."""
    sampling = [{}, {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "seed": 1 << 63}]
    drawn = [backend.step(make_batch(*(row(i, **sampling[i]) for i in range(2)))).token_ids]
    for step in range(1, 3):
        rows = [
            row(i, token_ids=[0 if carried else drawn[-1][i]], carried=carried, position=3 + step, output_position=step)
            | sampling[i]
            for i in range(2)
        ]
        drawn.append(backend.step(make_batch(*rows)).token_ids)
    return drawn


def test_same_tokens_as_the_reference(checkpoints: dict[str, Path]) -> None:
    """Match the reference's greedy and sampled tokens, carried on the device or fed by the host."""
    theirs = generate(make_backend(checkpoints["llama"]), carried=False)
    assert generate(make_triton(checkpoints["llama"]), carried=True) == theirs
    assert generate(make_triton(checkpoints["llama"]), carried=False) == theirs


def test_decode_is_captured_once_per_size(checkpoints: dict[str, Path]) -> None:
    """Capture decode once per padded size and replay it for any rows and contexts; do not capture prompts."""
    device = CountingDevice()
    ours, theirs = make_triton(checkpoints["llama"], device), make_backend(checkpoints["llama"])
    prompts = make_batch(*(row(i) for i in range(4)))
    assert ours.logits(prompts, []).shape == theirs.logits(prompts, []).shape == (0, VOCAB_SIZE)
    assert device.num_captured == 0
    # three rows are padded to four; each set of rows overwrites the columns of another
    for slots in ([0, 1, 2], [3, 1, 0, 2], [2, 3, 0], [1], [2]):
        rows = [row(i, token_ids=[TOKENS[i]], position=4) for i in slots]
        batch = make_batch(*rows)
        wanted = list(range(len(slots)))[::-1]
        torch.testing.assert_close(ours.logits(batch, wanted), theirs.logits(batch, wanted), atol=1e-4, rtol=0)
    assert device.num_captured == 2
    assert ours.runner.num_replayed == 5


def test_drafted_passes_are_replayed(checkpoints: dict[str, Path]) -> None:
    """Replay a graph for passes with drafts, whatever their sizes: none is captured after the start, and the tokens are
    those of single steps."""
    singly = make_triton(checkpoints["llama"])
    sampling: list[dict[str, Any]] = [{}, {"temperature": 1.3, "top_k": 30, "seed": 5}]
    prompts = make_batch(*(row(i, **sampling[i]) for i in range(2)))
    drawn = [singly.step(prompts).token_ids]
    for at in range(1, 12):
        fed = (row(i, token_ids=[drawn[-1][i]], position=3 + at, output_position=at) | sampling[i] for i in range(2))
        drawn.append(singly.step(make_batch(*fed)).token_ids)
    outputs = [list(column) for column in zip(*drawn, strict=True)]

    device = CountingDevice()
    config = runtime_config(speculative="ngram", max_num_seqs=2, max_num_batched_tokens=6).engine
    backend = make_triton(checkpoints["llama"], device, max_num_seqs=backend_config_of(config).max_num_seqs)
    backend.warm_up()
    num_captured, num_replayed = device.num_captured, backend.runner.num_replayed
    found = [[token_id] for token_id in backend.step(prompts).token_ids]
    for nums, wrong in (((3, 3), 2), ((0, 1), None), ((4, 0), 0), ((2, 4), None)):
        rows, drafts = [], {}
        for i, num in enumerate(nums):
            at = len(found[i])
            rows.append(row(i, token_ids=[found[i][-1]], position=3 + at, output_position=at) | sampling[i])
            if draft := outputs[i][at : at + num]:
                drafts[i] = [token_id ^ (place == wrong) for place, token_id in enumerate(draft)]
        expanded = ExpandedBatch.of(make_batch(*rows), drafts)
        kept = expanded.collapse(backend.step(expanded.batch))
        for i, token_id in enumerate(kept.token_ids):
            more = kept.more.get(i, [])
            assert len(more) == (min(nums[i], wrong) if wrong is not None else nums[i])
            found[i] += [token_id, *more]
    assert found == [output[: len(mine)] for output, mine in zip(outputs, found, strict=True)]
    assert (device.num_captured, backend.runner.num_replayed) == (num_captured, num_replayed + 4)


def test_eager_captures_nothing(checkpoints: dict[str, Path]) -> None:
    """Draw the same tokens without a graph where kernels are to be launched one by one."""
    device = CountingDevice()
    eager = generate(make_triton(checkpoints["llama"], device, enforce_eager=True), carried=True)
    assert device.num_captured == 0
    assert eager == generate(make_triton(checkpoints["llama"]), carried=True)


def test_warm_up(checkpoints: dict[str, Path]) -> None:
    """Capture every size of decode before the first request, and leave no token or KV behind."""
    device = CountingDevice()
    backend = make_triton(checkpoints["llama"], device)
    backend.warm_up()
    assert device.num_captured == 3  # 1, 2 and 4 rows
    with pytest.raises(ValueError, match="slot 0"):
        backend.step(make_batch(row(0, token_ids=[0], carried=True, position=4)))
    theirs = make_backend(checkpoints["llama"])
    for batch in (make_batch(row(0)), make_batch(row(0, token_ids=[9], position=4))):
        torch.testing.assert_close(backend.logits(batch, [0]), theirs.logits(batch, [0]), atol=1e-4, rtol=0)
    assert device.num_captured == 3


def test_parts_grow(checkpoints: dict[str, Path]) -> None:
    """Grow decode's memory for more chunks than it holds, capture again, and compute the same logits."""
    device = CountingDevice()
    ours, theirs = make_triton(checkpoints["llama"], device), make_backend(checkpoints["llama"])
    first = make_batch({"token_ids": TOKENS[:39], "position": 0, "blocks": BLOCKS})
    ours.logits(first, []), theirs.logits(first, [])
    ours.runner._memory = attrs.evolve(ours.runner._memory, parts=ours.runner._make_parts(1))
    near = make_batch(row(1, token_ids=TOKENS[:1]))
    ours.logits(near, []), theirs.logits(near, [])
    far = make_batch({"token_ids": TOKENS[39:40], "position": 39, "blocks": BLOCKS})
    torch.testing.assert_close(ours.logits(far, [0]), theirs.logits(far, [0]), atol=1e-4, rtol=0)
    assert device.num_captured == 2


def test_slot_without_drawn_token_cannot_carry(checkpoints: dict[str, Path]) -> None:
    """Raise an error that names the slot instead of feeding token 0 to the model."""
    backend = make_triton(checkpoints["llama"])
    with pytest.raises(ValueError, match="slot 3"):
        backend.step(make_batch(row(0, slot=3, token_ids=[0], carried=True, position=4)))


@pytest.mark.usefixtures("matrix_units")
def test_row_with_nan_logits_affects_no_other(checkpoints: dict[str, Path]) -> None:
    """Report a row that reads unwritten KV and has NaN logits; draw, score and carry the others as ever."""
    backend = make_triton(checkpoints["llama"], determinism="strict")
    first = backend.step(make_batch(row(0))).token_ids[0]
    carry = row(0, token_ids=[0], carried=True, position=4, output_position=1)
    batch = attrs.evolve(
        make_batch(row(1, token_ids=[1], position=3), carry), scoring=Scoring([0, 1], [2, 2], [], [], [])
    )
    drawn = backend.step(batch)
    assert drawn.broken_rows == [0]
    alone = make_triton(checkpoints["llama"], determinism="strict")
    alone.step(make_batch(row(0)))
    fed = row(0, token_ids=[first], position=4, output_position=1)
    expected = alone.step(attrs.evolve(make_batch(fed), scoring=Scoring([0], [2], [], [], [])))
    assert (drawn.token_ids[1], drawn.scores) == (expected.token_ids[0], expected.scores)
    again = row(0, token_ids=[0], carried=True, position=5, output_position=2)
    assert backend.step(make_batch(again)) == alone.step(make_batch(again))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": [VOCAB_SIZE]}, "token id"),
        ({"token_ids": [-1]}, "token id"),
        ({"position": 48, "blocks": [1] * 4}, "position"),
        ({"blocks": [160]}, "block 160"),
        ({"position": 16, "blocks": [1]}, "row 0 ends before"),
        ({"token_ids": [1] * 49, "blocks": [1] * 4}, "49 tokens"),
    ],
)
def test_out_of_bounds_batch_is_refused(checkpoints: dict[str, Path], changes: dict[str, Any], named: str) -> None:
    """Refuse a batch that would access memory outside of the model or the cache, before any launch."""
    backend = make_triton(checkpoints["llama"])
    with pytest.raises(ValueError, match=named):
        backend.step(make_batch({"token_ids": [1], "position": 0, "blocks": [1], **changes}))


def scored(backend: TritonBackend | ReferenceBackend, batch: StepBatch) -> tuple[list[Any], list[float]]:
    """Return everything reported about tokens except logprobs, and the logprobs."""
    drawn = backend.step(batch)
    assert drawn.scores is not None
    assert drawn.prompt_scores is not None
    both = [drawn.scores, drawn.prompt_scores]
    reported = [drawn.token_ids, *((s.token_ids, s.ranks, s.top_ids) for s in both)]
    return reported, [logprob for s in both for logprob in s.logprobs]


def test_scores_and_rules(checkpoints: dict[str, Path]) -> None:
    """Match the reference's logprobs, and its tokens sampled with a ban, a bias, a bit mask and a thinking budget."""
    rules = LogitRules(bias={7: 50.0}, allowed_token_ids=(5, 7, 9))
    budget = LogitRules(
        thinking_budget=0, reasoning_opening_ids=(1,), reasoning_closing_ids=(11,), prompt_opens_reasoning=True
    )
    mask = bytearray(VOCAB_SIZE // 8)
    mask[2] = 1  # token 16 alone

    def batch() -> StepBatch:
        return attrs.evolve(
            make_batch(row(0), row(1, temperature=1.0), row(2, samples=False), row(3)),
            processing=Processing(
                [0, 1],
                [LogitProcessor(which, prompt(4, seed=1), []) for which in (budget, rules)],
                [3],
                lambda: [bytes(mask)],
            ),
            scoring=Scoring([0, 3], [3, 0], [8, 9, 10], prompt(4, seed=2)[1:], [0, 2, 1]),
        )

    reported, logprobs = scored(make_triton(checkpoints["llama"]), batch())
    theirs, their_logprobs = scored(make_backend(checkpoints["llama"]), batch())
    assert reported == theirs
    assert logprobs == pytest.approx(their_logprobs, abs=1e-4)
    assert reported[0] == [11, 7, 16]


@pytest.mark.parametrize("columns", [(), (7, 3)])
def test_pooled_outputs(checkpoints: dict[str, Path], columns: tuple[int, ...]) -> None:
    """Match the reference's final states, of the last token and summed, without a head; and two of the logits with."""
    settings = {"headless": not columns}
    ours, theirs = (make(checkpoints["qwen3-odd"], **settings) for make in (make_triton, make_backend))
    batch = make_batch(row(0, samples=False), row(1, samples=False), row(2, samples=False))
    batch = attrs.evolve(batch, pooling=Pooling([0, 2], [0, 11], columns))
    for mine, other in zip(ours.step(batch).pooled, theirs.step(batch).pooled, strict=True):
        assert np.frombuffer(mine) == pytest.approx(np.frombuffer(other), abs=1e-3)
