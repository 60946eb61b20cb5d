"""Parsing the rotary embedding of a `config.json`, in either spelling.

What must always hold: each entry is either part of the result or refused by name; none is silently ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from .entry_types import is_number, shown


@attrs.frozen
class LinearScaling:
    """All frequencies are slowed by one factor (Chen et al., arXiv:2306.15595): `rope_type: linear`."""

    factor: float


@attrs.frozen
class Llama3Scaling:
    """Llama 3.1's scaling of low frequencies: `rope_type: llama3`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@attrs.frozen
class YarnScaling:
    """YaRN (Peng et al., arXiv:2309.00071): `rope_type: yarn`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the range of blended frequencies is widened to whole indexes."""
    attention_factor: float
    """Multiplies cosines and sines."""


@attrs.frozen
class ShortFactors:
    """The part of `rope_type: longrope` (Ding et al., arXiv:2402.13753) that applies up to the original length.

    Beyond it the long factors change the rotation of every token, including those already in the cache. A cached prefix
    would then depend on the length that its sequence reached, so longer lengths are refused (`config.check_length`).
    """

    factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@attrs.frozen
class ProportionalScaling:
    """Of the frequencies of whole heads only the first rotate, slowed by one factor: `rope_type: proportional`."""

    num_rotating: int
    factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | ShortFactors | ProportionalScaling


@attrs.frozen
class Rope:
    """A rotary embedding."""

    theta: float
    width: int
    """How many elements of a head are rotated, from its first on; even."""
    scaling: Scaling | None
    is_interleaved: bool = False
    """Whether neighbours are rotated together, else element r and r plus half of the width."""


def parse_rope(
    data: dict[str, Any],
    *,
    head_dim: int,
    entries: dict[str, Any] | None = None,
    partial: bool = False,
    proportional: bool = False,
    default_theta: float = 10_000.0,
    default_share: float = 1.0,
    is_interleaved: bool = False,
) -> Rope:
    """Parse `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`.

    `entries` replaces `rope_parameters` and `rope_scaling`, for families with several embeddings or names of their own;
    `partial` allows that only a part of each head is rotated, by default `default_share`, and `proportional` the type
    of that name. Raises ValueError naming the entry that is missing or not supported.
    """
    rope = rope_entries(data) if entries is None else dict(entries)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            "config.json: rope parameters that differ among layers are not supported for this architecture"
        )
    rope_type = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    theta = rope.pop("rope_theta", None) or data.get("rope_theta") or default_theta
    share = rope.pop("partial_rotary_factor", None) or data.get("partial_rotary_factor") or default_share
    width = int(head_dim * _number("partial_rotary_factor", share))
    if proportional and rope_type == "proportional":
        rope["partial_rotary_factor"], width = share, head_dim
    elif share != 1.0 and not partial:
        raise ValueError(f"config.json: partial_rotary_factor {share} is not supported for this architecture")
    if not 0 < width <= head_dim or width % 2:
        raise ValueError(
            f"config.json: partial_rotary_factor {share} rotates {width} of a head's {head_dim} elements, must be an "
            "even number"
        )
    parsers = _PARSERS | ({"proportional": _parse_proportional} if proportional else {})
    if rope_type not in parsers:
        known = ", ".join(map(repr, parsers))
        raise ValueError(f"config.json: rope_type {rope_type!r} is not supported, only {known}")
    entries_of_type = _Entries(rope_type, rope, data)
    scaling = parsers[rope_type](entries_of_type, width)
    entries_of_type.check_all_read()
    theta = _number("rope_theta", theta)
    if isinstance(scaling, YarnScaling) and theta <= 1:  # its logarithm is a divisor
        raise ValueError(f"config.json: rope_theta is {theta}, must be above 1 for rope_type 'yarn'")
    return Rope(theta=theta, width=width, scaling=scaling, is_interleaved=is_interleaved)


def parse_ropes_of_types(data: dict[str, Any], *, head_dim: int, thetas: tuple[float, float]) -> tuple[Rope, Rope]:
    """Parse the rotary embeddings of full and of windowed layers, whose bases are `thetas` by default.

    The older `rope_scaling` and `rope_theta` are those of full layers.
    """
    entries = rope_entries(data)
    if entries.keys() & {"full_attention", "sliding_attention"}:
        full, local = entries.get("full_attention") or {}, entries.get("sliding_attention") or {}
    else:
        full, local = {"rope_theta": data.get("rope_theta"), **entries}, {}
    both = [
        parse_rope_of_type(data, head_dim=head_dim, entries={**one, "rope_theta": one.get("rope_theta") or theta})
        for one, theta in zip((full, local), thetas, strict=True)
    ]
    return both[0], both[1]


def parse_rope_of_type(data: dict[str, Any], *, head_dim: int, entries: dict[str, Any], **options: bool) -> Rope:
    """Parse one of several rotary embeddings. The arguments are those of `parse_rope`.

    Raises ValueError also for `truncate` false, which transformers reads only where there is a single embedding.
    """
    if not entries.get("truncate", True):
        raise ValueError("config.json: truncate false is not supported where rotary embeddings differ among layers")
    return parse_rope(data, head_dim=head_dim, entries=entries, **options)


def rope_entries(data: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary entries of either spelling in one dictionary."""
    return {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}


class _Entries:
    """The entries of one rope_type. Those that have not been read at the end are refused."""

    def __init__(self, rope_type: str, rope: dict[str, Any], data: dict[str, Any]) -> None:
        self._rope_type = rope_type
        self._rope = rope
        self.data = data
        self._read: set[str] = set()

    def number(self, name: str, default: float | None = None) -> float:
        value = self.take(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"config.json: rope_type {self._rope_type!r} requires {name}")
        return _number(name, value)

    def original_length(self) -> int:
        """Read the original length. Phi writes it beside the rope parameters, which takes precedence."""
        within = self.take("original_max_position_embeddings")
        value = self.data.get("original_max_position_embeddings") or within
        if value is None:
            raise ValueError(f"config.json: rope_type {self._rope_type!r} requires original_max_position_embeddings")
        length = int(_number("original_max_position_embeddings", value))
        if length < 2:  # its logarithm is a divisor
            raise ValueError(f"config.json: original_max_position_embeddings is {length}, must be at least 2")
        return length

    def take(self, name: str, default: Any = None) -> Any:
        """Read an entry; null is not `default`."""
        self._read.add(name)
        return self._rope.get(name, default)

    def check_all_read(self) -> None:
        for name in sorted(self._rope.keys() - self._read):
            if self._rope[name] is not None:
                raise ValueError(f"config.json: {name} is not supported for rope_type {self._rope_type!r}")


def _number(name: str, value: Any) -> float:
    if not is_number(value) or value <= 0:
        raise ValueError(f"config.json: {name} is {shown(value)}, must be a positive number")
    return float(value)


def _parse_default(entries: _Entries, width: int) -> None:
    return None


def _parse_linear(entries: _Entries, width: int) -> LinearScaling:
    return LinearScaling(entries.number("factor"))


def _parse_llama3(entries: _Entries, width: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=entries.number("factor"),
        low_freq_factor=entries.number("low_freq_factor"),
        high_freq_factor=entries.number("high_freq_factor"),
        original_max_position_embeddings=entries.original_length(),
    )


def _parse_yarn(entries: _Entries, width: int) -> YarnScaling:
    factor = entries.number("factor")
    over, under = entries.take("mscale"), entries.take("mscale_all_dim")
    if over and under:
        usual = yarn_attention(factor, _number("mscale", over)) / yarn_attention(
            factor, _number("mscale_all_dim", under)
        )
    else:
        usual = yarn_attention(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=entries.original_length(),
        beta_fast=entries.number("beta_fast", 32.0),
        beta_slow=entries.number("beta_slow", 1.0),
        truncate=bool(entries.take("truncate", True)),
        attention_factor=entries.number("attention_factor", usual),
    )


def yarn_attention(factor: float, mscale: float) -> float:
    """Return the factor of queries, or of keys, for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _parse_longrope(entries: _Entries, width: int) -> ShortFactors:
    original = entries.original_length()
    factor = entries.number("factor", float(entries.data["max_position_embeddings"]) / original)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = entries.take("short_factor")
    entries.take("long_factor")
    if not isinstance(factors, list) or len(factors) != width // 2:
        raise ValueError(f"config.json: short_factor must be a list of {width // 2} numbers")
    return ShortFactors(
        factors=tuple(_number("short_factor", value) for value in factors),
        original_max_position_embeddings=original,
        attention_factor=entries.number("attention_factor", usual),
    )


def _parse_proportional(entries: _Entries, width: int) -> ProportionalScaling:
    share = entries.number("partial_rotary_factor")
    return ProportionalScaling(num_rotating=int(share * width // 2), factor=entries.number("factor", 1.0))


_PARSERS: dict[str, Callable[[_Entries, int], Scaling | None]] = {
    "default": _parse_default,
    "linear": _parse_linear,
    "llama3": _parse_llama3,
    "yarn": _parse_yarn,
    "longrope": _parse_longrope,
}
