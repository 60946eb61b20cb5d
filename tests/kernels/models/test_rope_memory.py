"""What tables of rotary embeddings may take."""

from __future__ import annotations

import pytest

from quipu.kernels.models.rope import make_rope_table
from quipu.kernels.models.rope_config import Rope


def test_table_beyond_all_memory() -> None:
    """A table for more positions than any machine could hold is refused before it is computed, by what to lower."""
    with pytest.raises(ValueError, match=r"rotary embedding of 1099511627776 positions .* lower --max-model-len"):
        make_rope_table(Rope(theta=1e4, width=64, scaling=None), 1 << 40)
