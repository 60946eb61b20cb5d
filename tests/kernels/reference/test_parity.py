"""The reference's logits compared with transformers' for every family: prefill, then decode with the paged cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.family_configs import CONFIGS
from tests.kernels.oracles import TOLERANCES, check, differences, run_reference, run_transformers


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_transformers(checkpoints: dict[str, Path], name: str) -> None:
    """Match within the tolerances at every position; bfloat16 is no further from float32 than transformers' own."""
    exact = run_transformers(checkpoints[name], "float32")
    assert exact.std() > 0.5, "logits too flat to detect a wrong model"
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
