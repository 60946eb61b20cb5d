"""Copies of rows between two caches: every alignment, and nothing beside the rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quipu.kernels.cpu.build import load_kernels
from tests.kernels.cpu.cpu_backends import needs_kernels


@needs_kernels
@given(
    to=st.integers(0, 130),
    from_=st.integers(0, 130),
    num_rows=st.integers(0, 3),
    row_bytes=st.integers(0, 400),
    gaps=st.tuples(st.integers(0, 70), st.integers(0, 70)),
)
def test_rows_of_any_alignment(to: int, from_: int, num_rows: int, row_bytes: int, gaps: tuple[int, int]) -> None:
    to_stride, from_stride = (row_bytes + gap for gap in gaps)
    source = np.arange(2000, dtype=np.int64).astype(np.uint8)
    target = np.full(2000, 255, np.uint8)
    expected = target.copy()
    for row in range(num_rows):
        copied = source[from_ + row * from_stride :][:row_bytes]
        expected[to + row * to_stride :][:row_bytes] = copied
    addresses = (target.ctypes.data + to, source.ctypes.data + from_)
    load_kernels().library.quipu_copy_rows(*addresses, num_rows, row_bytes, to_stride, from_stride)
    assert np.array_equal(target, expected)
