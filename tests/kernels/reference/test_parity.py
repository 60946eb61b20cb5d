"""The reference against transformers: prefill, then decode through the paged cache, on every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.kernel_checkpoints import CONFIGS
from tests.kernels.oracles import TOLERANCES, check, differences, run_reference, run_transformers


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_transformers(checkpoints: dict[str, Path], name: str) -> None:
    """Every position's logits agree within the tolerances, and bfloat16 lies no further off than transformers' own."""
    exact = run_transformers(checkpoints[name], "float32")
    assert exact.std() > 0.5, "logits too flat to tell a wrong model from a right one"
    for dtype in TOLERANCES:
        check(
            name,
            dtype,
            differences(run_reference(checkpoints[name], dtype), run_transformers(checkpoints[name], dtype)),
        )
    ours = differences(run_reference(checkpoints[name], "bfloat16"), exact)
    theirs = differences(run_transformers(checkpoints[name], "bfloat16"), exact)
    print(name, "to float32: ours", ours, "theirs", theirs)
    assert ours.mean <= theirs.mean
