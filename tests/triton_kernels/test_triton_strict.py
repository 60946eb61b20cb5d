"""The strict mode in the interpreter: it checks the kernels first, and its results are bit-identical."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from quipu.kernels.triton import probe
from quipu.kernels.triton.configs import token_ladder
from quipu.kernels.triton.matrices import LibraryLinear, OwnLinear
from quipu.kernels.triton.probe import products_are_invariant
from tests.kernels.kernel_checkpoints import EACH
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks
from tests.triton_kernels.interpreter import SMALL
from tests.triton_kernels.test_triton_backend import BLOCKS, TOKENS, make_triton

pytestmark = pytest.mark.usefixtures("matrix_units")


class FirstRowsLinear(LibraryLinear):
    """A library whose results depend on the number of rows, as cuBLAS's may."""

    def __call__(
        self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        exact = super().__call__(x_NI, weight_OI, bias_O, dtype)
        return torch.nextafter(exact, exact + 1) if x_NI.shape[0] > 4 else exact


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_own_product(rows: int, biased: bool) -> None:
    """Match torch's product for few and many rows, a K that slices do not divide, and partial tiles of columns."""
    x_NI, weight_OI, bias_O = torch.randn(rows, 72), torch.randn(37, 72), torch.randn(37)
    ours = OwnLinear(SMALL)(x_NI, weight_OI, bias_O if biased else None, torch.float32)
    torch.testing.assert_close(ours, torch.nn.functional.linear(x_NI, weight_OI, bias_O if biased else None))


def test_variant_product_is_detected() -> None:
    """Pass our own product, and detect one whose bits depend on the number of rows."""
    weight_OI, sizes = torch.randn(24, 48), [1, 4, 8, 16, 24]
    assert products_are_invariant(OwnLinear(SMALL), weight_OI, sizes, torch.float32)
    assert not products_are_invariant(FirstRowsLinear(), weight_OI, sizes, torch.float32)


def test_ladder() -> None:
    """Return ascending sizes up to the largest, so that padding adds at most 8 tokens or a seventh."""
    for most in (1, 7, 48, 100, 8192):
        sizes = token_ladder(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        assert all(above - below <= max(8, below / 7) for below, above in itertools.pairwise(sizes))
    assert len(token_ladder(8192)) < 64


@pytest.mark.parametrize("name", EACH)
def test_batch_invariance(checkpoints: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Match one prefill with chunks and single tokens among other rows, in other blocks, and report invariance.

    Use our own product if the library's depends on the number of rows.
    """
    monkeypatch.setattr(probe, "products_are_invariant", lambda linear, *_: linear.name == "own")  # minutes otherwise
    backend = make_triton(checkpoints[name], determinism="strict")
    assert backend.capabilities.invariant
    assert backend.strict_kernels is not None
    assert backend.strict_kernels.linear.name == "own"
    length, num_compared = 20, 2
    whole = make_batch({"token_ids": TOKENS[:length], "position": 0, "blocks": BLOCKS})
    cold = backend.logits(whole, list(range(length - num_compared, length)))
    assert cold.isfinite().all()
    backend.cache.fill(float("nan"))
    results, position, others = [], 0, scattered_blocks(7, seed=4)
    for index, size in enumerate([7, 11, *[1] * num_compared]):
        mine = {"token_ids": TOKENS[position : position + size], "position": position, "blocks": others[:3], "slot": 1}
        beside = [
            {"token_ids": prompt(1 + 2 * i, seed=index + i), "position": 0, "blocks": [others[3 + i]], "slot": 2 * i}
            for i in range(2)
        ]
        batch = make_batch(beside[0], mine, beside[1]) if index % 2 else make_batch(mine, *beside)
        first = batch.query_start[index % 2]
        results.append(backend.logits(batch, [first] if size == 1 else []))
        position += size
    assert torch.equal(torch.cat(results), cold)


@pytest.mark.parametrize("name", EACH)
def test_draft_rows(checkpoints: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Match one prefill with rows of one token each in one pass, the later of which read what the earlier write."""
    monkeypatch.setattr(probe, "products_are_invariant", lambda linear, *_: linear.name == "own")
    backend = make_triton(checkpoints[name], determinism="strict")
    assert backend.capabilities.verifies_drafts
    length, num_compared, blocks = 20, 3, scattered_blocks(5, seed=6)
    whole = make_batch({"token_ids": TOKENS[:length], "position": 0, "blocks": BLOCKS})
    cold = backend.logits(whole, list(range(length - num_compared, length)))
    backend.cache.fill(float("nan"))
    head = length - num_compared
    backend.logits(make_batch({"token_ids": TOKENS[:head], "position": 0, "blocks": blocks[:3], "slot": 1}), [])
    drafted = [
        {"token_ids": [TOKENS[position]], "position": position, "blocks": blocks[:3], "slot": 1}
        for position in range(head, length)
    ]
    beside = {"token_ids": prompt(9, seed=1), "position": 0, "blocks": [blocks[3]], "slot": 0}
    batch = make_batch(*drafted, beside)
    assert torch.equal(backend.logits(batch, list(range(num_compared))), cold)


def test_fast_does_not_claim_invariance(checkpoints: dict[str, Path]) -> None:
    """Do not claim strict if it was not requested, because nothing has been checked."""
    backend = make_triton(checkpoints["qwen3-tied"])
    assert not backend.capabilities.invariant
