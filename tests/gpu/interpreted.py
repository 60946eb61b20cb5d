"""The interpreter's matrix products as a tensor core makes them: every row of a tile alike.

numpy's, which it takes, show the place of a row within its tile; what is to be the same to the bit cannot be tested on
them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """In place of `InterpreterBuilder.create_dot`: sums over k, ascending, for every element."""
    product = np.add.reduce(a.data[:, :, None] * b.data[None], axis=1)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
