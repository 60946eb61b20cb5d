"""Adapters on the interpreter: the reference's logits, graphs for any adapters, and the same bits in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quipu.kernels.adapters.adapter_folder import read_adapter_files
from quipu.kernels.adapters.low_rank import read_low_rank
from quipu.kernels.batch import StepBatch
from quipu.kernels.triton import probe
from quipu.kernels.triton.row_groups import group_rows, most_tiles
from quipu.kernels.triton.triton_adapters import TritonAdapters
from quipu.kernels.triton.triton_backend import TritonBackend
from tests.kernels.adapters.peft_adapters import make_adapter, targets_of, with_adapters
from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.one_prompt import Backend
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks
from tests.triton_kernels.test_triton_backend import TOKENS, CountingDevice, make_triton, row

NAMES = ["llama", "qwen3-odd", "qwen3-moe", "gemma2", "phi3"]


def load(backend: Backend, checkpoint: Path, name: str, folder: Path) -> list[str]:
    """Load two adapters of different ranks and modules; return none, the first and the second."""
    first, second = folder / "first", folder / "second"
    if not first.exists():
        make_adapter(first, checkpoint, target_modules=targets_of(name), r=3)
        make_adapter(second, checkpoint, target_modules=["o_proj", "lm_head"], r=16)
    return ["", backend.load_adapter(first), backend.load_adapter(second)]


def beside_another(start: int, end: int) -> StepBatch:
    mine = {"token_ids": TOKENS[start:end], "position": start, "blocks": scattered_blocks(3, seed=1), "slot": 1}
    return make_batch(row(0, token_ids=prompt(1, seed=9)), mine, row(2))


@pytest.mark.parametrize("name", NAMES)
def test_logits_match_the_reference(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Match the reference: two chunks of a prompt, then a decoded token, beside rows of another adapter and of none."""
    ours, theirs = make_triton(checkpoints[name], max_loras=2), make_backend(checkpoints[name], max_loras=2)
    none, first, second = load(ours, checkpoints[name], name, tmp_path)
    assert load(theirs, checkpoints[name], name, tmp_path) == [none, first, second]
    for start, end in ((0, 9), (9, 20), (20, 21)):
        batch = with_adapters(beside_another(start, end), second, first, none)
        wanted = list(range(1 + end - start + 4))
        found = ours.logits(batch, wanted)
        torch.testing.assert_close(found, theirs.logits(batch, wanted), atol=2e-4, rtol=0)
    differences = (found - ours.logits(beside_another(20, 21), wanted)).abs().amax(1)
    assert differences[:2].min() > 0.05 and differences[2:].max() < 1e-4


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_over_quantized_weights(checkpoints: dict[str, Path], tmp_path: Path, quantization: str) -> None:
    """Match the reference where the model's weights are quantized."""
    settings = {"max_loras": 2, "quantization": quantization}
    ours, theirs = (make(checkpoints["llama"], **settings) for make in (make_triton, make_backend))
    adapters = load(ours, checkpoints["llama"], "llama", tmp_path)
    assert load(theirs, checkpoints["llama"], "llama", tmp_path) == adapters
    batch = with_adapters(beside_another(0, 9), adapters[2], adapters[1], "")
    torch.testing.assert_close(
        ours.logits(batch, list(range(14))), theirs.logits(batch, list(range(14))), atol=2e-4, rtol=0
    )


def decoding(adapters: list[str]) -> StepBatch:
    rows = [row(slot, token_ids=[TOKENS[slot]], position=4) for slot in range(len(adapters))]
    return with_adapters(make_batch(*rows), *adapters)


def test_one_graph_for_any_adapters(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Replay the graph that some adapters were captured with for others, and for those that are loaded later."""
    device = CountingDevice()
    ours = make_triton(checkpoints["llama"], device, max_loras=2)
    theirs = make_backend(checkpoints["llama"], max_loras=3)
    none, first, second = load(ours, checkpoints["llama"], "llama", tmp_path)
    load(theirs, checkpoints["llama"], "llama", tmp_path)
    prompts = make_batch(*(row(slot) for slot in range(4)))
    ours.logits(prompts, []), theirs.logits(prompts, [])

    def compare(*adapters: str) -> None:
        batch = decoding(list(adapters))
        wanted = list(range(len(adapters)))[::-1]
        torch.testing.assert_close(ours.logits(batch, wanted), theirs.logits(batch, wanted), atol=2e-4, rtol=0)

    compare(first, none, second, second)
    assert device.num_captured == 1
    for adapters in ([second, second, first, none], [none, none, none, first], [first, second, first]):
        compare(*adapters)
    third = make_adapter(tmp_path / "third", checkpoints["llama"], r=5)
    ours.unload_adapter(first)
    loaded = ours.load_adapter(third)
    assert theirs.load_adapter(third) == loaded
    compare(loaded, second, none, loaded)
    assert device.num_captured == 1
    compare(none, none, none, none)
    assert device.num_captured == 2  # a pass without adapters launches nothing for them
    with pytest.raises(ValueError, match="not loaded"):
        ours.logits(decoding([first]), [0])


def test_warm_up(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Capture every size of decode with and without adapters before the first request."""
    device = CountingDevice()
    backend = make_triton(checkpoints["llama"], device, max_loras=2, max_num_seqs=2)
    backend.warm_up()
    assert device.num_captured == 4  # 1 and 2 rows
    adapters = load(backend, checkpoints["llama"], "llama", tmp_path)
    backend.logits(make_batch(row(0), row(1)), [])
    assert backend.logits(decoding(adapters[:2]), [0, 1]).isfinite().all()
    assert device.num_captured == 4


@pytest.fixture
def own_products(matrix_units: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take our own products, of rows that do not depend on each other, without checking any."""
    monkeypatch.setattr(probe, "products_are_invariant", lambda linear, *_: linear.name == "own")  # minutes otherwise


def run_strict(backend: TritonBackend, rows: list[tuple[dict[str, Any], str]]) -> torch.Tensor:
    backend.cache.fill(float("nan"))
    batch = make_batch(*(one for one, _ in rows))
    batch = with_adapters(batch, *(adapter for _, adapter in rows)) if any(adapter for _, adapter in rows) else batch
    return backend.logits(batch, [end - 1 for end in batch.query_start[1:]])


@pytest.mark.usefixtures("own_products")
@pytest.mark.parametrize("name", ["llama", "qwen3-odd"])
def test_batch_invariance(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Give each row the bits that it has alone, and those without an adapter the bits of a server without any."""
    strict = make_triton(checkpoints[name], max_loras=2, determinism="strict")
    assert strict.capabilities.invariant
    plain = make_triton(checkpoints[name], determinism="strict")
    none, first, second = load(strict, checkpoints[name], name, tmp_path)
    lengths = (18, 1, 5, 2)
    for chosen in ([first, none, second, first], [second, second, none, second]):
        rows = [
            ({"token_ids": prompt(length, seed=length), "position": 0, "blocks": [5 + 2 * at, 6 + 2 * at]}, adapter)
            for at, (length, adapter) in enumerate(zip(lengths, chosen, strict=True))
        ]
        together = run_strict(strict, [({**one, "slot": at}, adapter) for at, (one, adapter) in enumerate(rows)])
        for at, (one, adapter) in enumerate(rows):
            assert torch.equal(run_strict(strict if adapter else plain, [(one, adapter)])[0], together[at])


@pytest.mark.usefixtures("own_products")
def test_strict_is_refused_where_rows_depend_on_others(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse to start if an adapter's kernels do not keep what strict mode promises."""
    apply = TritonAdapters.apply

    def by_number(
        self: TritonAdapters, x_NI: torch.Tensor, weight_OI: torch.Tensor, y_NO: torch.Tensor, groups: Any
    ) -> None:
        apply(self, x_NI, weight_OI, y_NO, groups)
        y_NO += 0.001 * len(x_NI)

    monkeypatch.setattr(TritonAdapters, "apply", by_number)
    with pytest.raises(ValueError, match="strict is not available with --enable-lora"):
        make_triton(checkpoints["llama"], max_loras=1, determinism="strict")


def test_products(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Match torch for a fused product, whose parts have adapters of other ranks, in tiles of many and few rows."""
    backend = make_triton(checkpoints["llama"], max_loras=3, max_lora_rank=20)
    patterns = [{"r": 20, "rank_pattern": {"k_proj": 3}}, {"r": 7}, {"r": 5}]
    targets = [["q_proj", "k_proj"], ["v_proj"], ["q_proj", "v_proj"]]
    for at, (settings, modules) in enumerate(zip(patterns, targets, strict=True)):
        folder = make_adapter(tmp_path / str(at), checkpoints["llama"], target_modules=modules, **settings)
        backend.load_adapter(folder)
    adapters, matrices = backend.adapters, backend.named_weights.matrices
    assert adapters is not None
    weight_OI, parts = next(found for found in matrices.values() if len(found[1]) == 3)
    x_NI, chosen = torch.randn(41, weight_OI.shape[1]), np.array([-1, 0, 2] * 13 + [0, 1], dtype=np.int32)
    y_NO = torch.randn(41, weight_OI.shape[0])
    expected_NO = y_NO.clone()
    files = [read_adapter_files(tmp_path / str(at), most_bytes=1 << 20) for at in range(3)]
    linear = backend.named_weights.linear
    read = [read_low_rank(each, linear, (), max_rank=20, dtype=torch.float32) for each in files]
    for at, slot in enumerate(chosen.tolist()):
        column = 0
        for part in parts:
            low = read[slot].get(part.module) if slot >= 0 else None
            if low is not None:
                expected_NO[at, column : column + part.rows] += x_NI[at] @ low.a_RI.T @ low.b_OR.T
            column += part.rows
    adapters.apply(x_NI, weight_OI, y_NO, adapters.groups(chosen))
    torch.testing.assert_close(y_NO, expected_NO, atol=1e-4, rtol=1e-4)
    assert (y_NO[1] - expected_NO[0]).abs().max() > 0.01


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 100])
def test_grouping(num_rows: int) -> None:
    """Put each row with an adapter into one tile of its slot, in as few tiles as a graph has programs for."""
    for seed in range(20):
        slots = np.random.default_rng(seed).integers(-1, 3, num_rows).astype(np.int32)
        rows, tiles = group_rows(slots, 16)
        assert sorted(rows.tolist()) == np.flatnonzero(slots >= 0).tolist()
        covered = [at for slot, first, count in tiles.tolist() for at in range(first, first + count)]
        assert covered == list(range(len(rows)))
        for slot, first, count in tiles.tolist():
            assert (slots[rows[first : first + count]] == slot).all()
            assert 0 < count <= 16
        assert len(tiles) <= most_tiles(num_rows, 16, 3)
