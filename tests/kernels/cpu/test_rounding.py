"""Values stored rounded: what a product would round anyway, and the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quipu.kernels.cpu import program, recording
from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.cpu.program import Op
from tests.kernels.cpu.cpu_backends import make_cpu_backend
from tests.kernels.cpu.cpu_paths import PATHS, CpuPath, kernels_of
from tests.kernels.cpu.test_fusing import logits_of
from tests.kernels.family_configs import CONFIGS
from tests.kernels.kernel_checkpoints import THOROUGH

pytestmark = pytest.mark.timeout(600)  # the first use of an emulated instruction set compiles it

ROUNDING = [path for path in PATHS if path.rounds_activations]
OTHERS = [path for path in PATHS if not path.rounds_activations]
CASES = [
    pytest.param(path, name, marks=() if name in THOROUGH or ROUNDING[turn % 2] is path else pytest.mark.slow)
    for turn, name in enumerate(CONFIGS)
    for path in ROUNDING
]
"""Each family on one of the instruction sets, in turn, and those that together use every operation on both."""


def rounded(backend: CpuBackend) -> list[Op]:
    """Return the operations whose results are stored rounded, of those that compute all rows."""
    return [op for op in backend._program.trunk if op.y_rounded]


@pytest.mark.parametrize(("path", "name"), CASES, ids=str)
def test_bits_of_values_stored_as_float32(
    checkpoints: dict[str, Path], path: CpuPath, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute the same bits with values that are stored rounded as with float32, fused and not."""

    def make() -> CpuBackend:
        return make_cpu_backend(checkpoints[name], kernels=kernels_of(path), num_threads=2, dtype="bfloat16")

    ours = logits_of(make())
    with monkeypatch.context() as unfused:
        unfused.setattr(recording, "fuse", list)
        assert torch.equal(logits_of(make()), ours)
    monkeypatch.setattr(recording, "store_rounded", lambda calls, values: None)
    stored_as_float32 = make()
    assert not rounded(stored_as_float32)
    assert torch.equal(logits_of(stored_as_float32), ours)


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("path", ROUNDING, ids=str)
def test_what_is_rounded(checkpoints: dict[str, Path], path: CpuPath, kv_cache_dtype: str) -> None:
    """Store the results of attention and of activations rounded, but for those of which drawing rows are gathered."""
    backend = make_cpu_backend(
        checkpoints["qwen3-tied"], kernels=kernels_of(path), dtype="bfloat16", kv_cache_dtype=kv_cache_dtype
    )
    layer = [program.ATTEND, program.LINEAR]
    assert [op.kind for op in rounded(backend)] == [*layer, program.LINEAR]
    assert [op.y for op in rounded(backend)] == [op.x for op in backend._program.trunk if op.x_rounded]
    drawing = [op for op in backend._program.draw if op.on_logits_rows and op.y_rounded]
    assert [op.kind for op in drawing] == [program.LINEAR]


@pytest.mark.parametrize("path", ROUNDING, ids=str)
def test_what_is_not(checkpoints: dict[str, Path], path: CpuPath) -> None:
    """Round nothing for products that read float32, nor in rows that are not whole panels."""
    kernels = kernels_of(path)
    for name, changes in (
        ("qwen3-tied", {"dtype": "float32"}),
        ("qwen3-tied", {"dtype": "bfloat16", "quantization": "int8"}),
        ("qwen3-odd", {"dtype": "bfloat16"}),
    ):
        assert not rounded(make_cpu_backend(checkpoints[name], kernels=kernels, **changes))
    of_keys = make_cpu_backend(checkpoints["qwen3-tied"], kernels=kernels, dtype="bfloat16", kv_cache_dtype="float32")
    assert {op.kind for op in rounded(of_keys)} == {program.LINEAR}


@pytest.mark.parametrize("path", OTHERS, ids=str)
def test_other_instruction_sets(checkpoints: dict[str, Path], path: CpuPath) -> None:
    """Round nothing where products read float32."""
    assert not rounded(make_cpu_backend(checkpoints["qwen3-tied"], kernels=kernels_of(path), dtype="bfloat16"))
