"""Fuses operations that one kernel can do together, so that models need not know of fused kernels.

    rms_norm, linear                              the product norms its input
    rms_norm, low_rank, linear                    both products norm it
    linear, silu_mul or gelu_mul                  the product stores only the activation of gate and up
    linear, add                                   the product adds
    rms_norm, rope, rms_norm, rope,
    write_kv, attend                              attention norms, rotates and writes keys itself (norms are optional)

Each fusion saves a barrier between threads and a value's round trip through memory. `recording.py` is the only caller.

What must always hold: a value is eliminated only if no other operation reads it; the bits are those of separate calls.
"""

from __future__ import annotations

from collections import Counter

import attrs

from . import program
from .recorded import Place, RecordedOp

_OF_ROPE = ("cos", "sin", "out_width", "interleaved")


def fuse(calls: list[RecordedOp]) -> list[RecordedOp]:
    """Return the same calls, fused where possible."""
    readers = Counter(value for call in calls for value in call.read)
    makers = {call.y.value: call for call in calls}
    calls = _norms_before_adapters(_attention_in_one(calls, readers, makers), readers)
    fused: list[RecordedOp] = []
    for call in calls:
        last = fused[-1] if fused else None
        both = None if last is None else _two_in_one(last, call, readers)
        if both is None:
            fused.append(call)
        else:
            fused[-1] = both
    return fused


def _two_in_one(first: RecordedOp, second: RecordedOp, readers: Counter[int]) -> RecordedOp | None:
    """Return both as one call, or None if no kernel does both."""
    if readers[first.y.value] != 1:
        return None
    whole = Place(first.y.value, 0)
    if first.kind == program.RMS_NORM and second.kind == program.LINEAR and second.x == whole:
        if first.fields["num_heads"] != 1:
            return None
        fields = {**second.fields, "norm": first.fields["weight"], "eps": first.fields["eps"]}
        return attrs.evolve(second, fields=fields, x=first.x, scratch=whole)
    if first.kind != program.LINEAR or first.z is not None or first.fields.get("activation"):
        return None
    if second.kind in (program.SILU_MUL, program.GELU_MUL) and second.x == whole:
        return attrs.evolve(first, fields={**first.fields, "activation": second.kind}, y=second.y, raw=whole)
    if second.kind == program.ADD and whole in (second.x, second.z):
        added = second.z if second.x == whole else second.x
        return attrs.evolve(first, z=added, y=second.y)
    return None


def _norms_before_adapters(calls: list[RecordedOp], readers: Counter[int]) -> list[RecordedOp]:
    """Fuse each norm with the narrow product and the product of its result, which an adapter changes."""
    result: list[RecordedOp] = []
    for call in calls:
        norm, narrow = (result[-2], result[-1]) if len(result) > 1 else (None, None)
        if (
            norm is not None and narrow is not None
            and (norm.kind, narrow.kind, call.kind) == (program.RMS_NORM, program.LOW_RANK, program.LINEAR)
            and norm.fields["num_heads"] == 1
            and call.x == narrow.x == Place(norm.y.value, 0)
            and readers[norm.y.value] == 2
        ):  # fmt: skip
            fields = {"norm": norm.fields["weight"], "eps": norm.fields["eps"]}
            result[-2:] = [attrs.evolve(narrow, fields={**narrow.fields, **fields}, x=norm.x)]
            call = attrs.evolve(call, fields={**call.fields, **fields}, x=norm.x, scratch=norm.y)
        result.append(call)
    return result


def _attention_in_one(
    calls: list[RecordedOp], readers: Counter[int], makers: dict[int, RecordedOp]
) -> list[RecordedOp]:
    """Fuse each attention with the calls before it, if queries, keys and values are heads of one value."""
    result: list[RecordedOp] = []
    for call in calls:
        fused = _attention(call, result, readers, makers) if call.kind == program.ATTEND else None
        if fused is not None:
            del result[-fused[1] :]
        result.append(call if fused is None else fused[0])
    return result


def _attention(
    attend: RecordedOp, before: list[RecordedOp], readers: Counter[int], makers: dict[int, RecordedOp]
) -> tuple[RecordedOp, int] | None:
    """Return the fused call, and the number of preceding calls that it replaces."""
    write = before[-1]
    if write.kind != program.WRITE_KV or write.x is None or write.z is None or attend.x is None:
        return None
    if write.fields["keys"] != attend.fields["keys"]:
        return None
    q, k = (_rotated(place, readers, makers) for place in (attend.x, write.x))
    if q is None or k is None:
        return None
    inside = [*q, *k]
    if {id(call) for call in before[-1 - len(inside) : -1]} != {id(call) for call in inside}:
        return None
    q_rope, k_rope = q[-1], k[-1]
    q_from, k_from = q[0].x, k[0].x
    if q_from is None or k_from is None or {k_from.value, write.z.value} != {q_from.value}:
        return None
    if any(q_rope.fields[name] != k_rope.fields[name] for name in (*_OF_ROPE, "width")):
        return None
    norms = [call for call in inside if call.kind == program.RMS_NORM]
    if len({call.fields["eps"] for call in norms}) > 1:
        return None
    fields = {
        **attend.fields,
        "fused_rope": True,
        **{name: q_rope.fields[name] for name in _OF_ROPE},
        "norm": q[0].fields["weight"] if len(q) == 2 else None,
        "key_norm": k[0].fields["weight"] if len(k) == 2 else None,
        "eps": norms[0].fields["eps"] if norms else 0.0,
    }
    return RecordedOp(fields, q_from, k_from, attend.y, v=write.z, scratch=attend.x), 1 + len(inside)


def _rotated(place: Place, readers: Counter[int], makers: dict[int, RecordedOp]) -> list[RecordedOp] | None:
    """Return the rope call that made this value, preceded by the norm of its heads if there is one; None if the
    value is not the result of a rope.

    A norm over all heads together is not fused: attention norms each head by itself.
    """
    rope = makers[place.value]
    if rope.kind != program.ROPE or readers[place.value] != 1 or rope.x is None or place.offset:
        return None
    norm = makers[rope.x.value]
    of_heads = all(norm.fields.get(name) == rope.fields[name] for name in ("width", "num_heads"))
    if norm.kind == program.RMS_NORM and of_heads and readers[rope.x.value] == 1:
        return [norm, rope]
    return [rope]
