"""Entries of a config.json whose type is wrong are refused before any family reads them."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.kernels.models.entry_types import check_types
from tests.kernels.models.parsed_configs import config_of


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama", {"head_dim": True}, "head_dim is True, must be an integer"),
        ("llama", {"hidden_size": 1 << 31}, "hidden_size is 2147483648, must be an integer"),
        ("llama", {"rope_parameters": {"rope_theta": "1e4"}}, "rope_parameters.rope_theta is '1e4', must be a number"),
        ("llama", {"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is NaN, must be a number"),
        ("granite", {"residual_multiplier": 1e-320}, "residual_multiplier is 1e-320, must be a number"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": 3.0}},
            "rope_parameters.full_attention is 3.0, must be an obj",
        ),
        (
            "gemma4",
            {"rope_scaling": {"sliding_attention": 3}},
            "rope_scaling.sliding_attention is 3, must be an object",
        ),
    ],
)
def test_wrong_types(name: str, changes: dict[str, Any], named: str) -> None:
    """The message has the entry, its value and what it must be."""
    check_types(config_of(name))
    with pytest.raises(ValueError, match=named):
        check_types(config_of(name, **changes))
