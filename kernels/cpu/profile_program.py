"""A program for the profile run: each distinct kernel of a model once, in its order.

Layers are alike and share their memory, so that one of them takes what all do, in a fraction of the time: on a slow
machine the whole largest pass of a model of some billion weights would take minutes. What it computes means nothing.
"""

from __future__ import annotations

import ctypes

import attrs
import torch

from .program import Op
from .recorder import Program

_NUMBERS = [name for name, kind, *_ in Op._fields_ if kind is not ctypes.c_void_p and name != "joined"]


@torch.inference_mode()
def each_kernel_once(program: Program) -> Program:
    """The same memory, touched to its end, and the first operation of each kind and shape."""
    for tensor in program.workspace:
        tensor.zero_()
    first: dict[tuple[float, ...], Op] = {}
    for op in program.whole:
        first.setdefault(tuple(getattr(op, name) for name in _NUMBERS), op)
    kept = (Op * len(first))(*first.values())
    for op in kept:
        op.joined = 0  # its neighbour is another one now
    return attrs.evolve(program, whole=kept)
