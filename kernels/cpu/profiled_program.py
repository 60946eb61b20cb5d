"""Programs as the profile run needs them, which measures the memory of the largest pass. Used by `cpu_backend.py`.

What must always hold: a profiled program uses as much memory as the whole one, and takes a fraction of its time.
"""

from __future__ import annotations

import ctypes
from itertools import chain

import attrs
import torch

from .program import Op
from .recorded import Program


@torch.inference_mode()
def each_kernel_once(program: Program) -> Program:
    """Touch all memory, and return a program of the first operation of each kind and shape, for the profile run.

    Layers share their memory, so one layer needs as much as all of them; running all of them could take minutes on a
    slow machine, for a model with billions of weights. The results are meaningless.
    """
    touch(program)
    numbers = [name for name, kind, *_ in Op._fields_ if kind is not ctypes.c_void_p and name != "no_barrier"]
    first: dict[tuple[float, ...], Op] = {}
    for op in chain(program.draw, program.trunk, program.head):
        first.setdefault(tuple(getattr(op, name) for name in numbers), op)
    kept = (Op * len(first))(*first.values())
    for op in kept:
        op.no_barrier = 0  # another operation may follow now
    return attrs.evolve(program, draw=kept, memory=[*program.memory, program.draw])  # to which operations point


@torch.inference_mode()
def touch(program: Program) -> None:
    """Write to all memory that its passes write to."""
    for tensor in program.workspace:
        tensor.zero_()
