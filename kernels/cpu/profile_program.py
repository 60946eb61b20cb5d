"""A program for the profile run: each distinct operation of a model once, in order.

Layers are alike and share their memory, so one of them needs as much as all, in a fraction of the time: on a slow
machine the largest pass of a model with billions of weights would take minutes. The results mean nothing.
"""

from __future__ import annotations

import ctypes
from itertools import chain

import attrs
import torch

from .program import Op
from .recorder import Program

_NUMBERS = [name for name, kind, *_ in Op._fields_ if kind is not ctypes.c_void_p and name != "no_barrier"]


@torch.inference_mode()
def each_kernel_once(program: Program) -> Program:
    """Touch all memory, and return a program of the first operation of each kind and shape."""
    for tensor in program.workspace:
        tensor.zero_()
    first: dict[tuple[float, ...], Op] = {}
    for op in chain(program.draw, program.trunk, program.head):
        first.setdefault(tuple(getattr(op, name) for name in _NUMBERS), op)
    kept = (Op * len(first))(*first.values())
    for op in kept:
        op.no_barrier = 0  # another operation may follow now
    return attrs.evolve(program, draw=kept)
