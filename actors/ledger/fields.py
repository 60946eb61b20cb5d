"""A usage record as flat named values, as entries, database rows and exports contain it.

`FlatRecord` lists the fields; `flatten` converts a record and `restore` converts it back. Used everywhere in this
package; does no I/O.

What must always hold: every field of `UsageRecord` is included; text is bounded and can be stored by any database.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from operator import attrgetter
from typing import Any, Final, Literal

import attrs
import msgspec

from ..messages.block_manager import CacheMiss, MissReason
from ..messages.counts import UNKNOWN, Count, Estimate, Known, kind_of, shown
from ..messages.outcomes import Fault, FinishReason, Outcome
from ..messages.scheduler import SequenceKind
from ..messages.usage_record import UsageRecord

Value = str | int | float | bool | None
CountKind = Literal["known", "estimate", "unknown"]

MAX_TEXT_CHARS: Final = 256
"""The web layer has its own limits; the reserved room relies on this one."""
MAX_SAID_CHARS: Final = 1024
"""Of the usage that an upstream reports; of a longer one nothing is kept."""
MAX_MISSES: Final = 32
"""Of a list of prompts, only the first ones have their cache miss recorded."""
MAX_MOVED_TO: Final = 16
"""Of a request that went to more engines, only the first ones are recorded. The sum is complete."""
TIERS: Final = ("device", "host", "disk", "remote", "unattributed")


class FlatRecord(msgspec.Struct, kw_only=True):
    """The fields and their types, in the order of exports."""

    request_id: str
    client_request_id: str | None
    idempotency_key: str | None
    idempotency_digest: str | None
    retry_of: str | None
    tenant: str
    key_id: str | None
    model: str
    endpoint: str
    received_at: float
    admitted_at: float | None
    first_token_at: float | None
    closed_at: float
    outcome: Outcome
    finish_reason: FinishReason | None
    num_choices: int
    prompt_tokens: int | None
    prompt_kind: CountKind
    cached_tokens: int | None
    cached_kind: CountKind
    cached_device_tokens: int | None
    cached_host_tokens: int | None
    cached_disk_tokens: int | None
    cached_remote_tokens: int | None
    cached_unattributed_tokens: int | None
    cache_write_tokens: int | None
    cache_write_kind: CountKind
    created_5m_tokens: int
    created_1h_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    computed_tokens: int
    restored_tokens: int
    recomputed_tokens: int
    moved_tokens: int
    moved_by_engine: str
    draft_tokens: int
    accepted_draft_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    disputed: bool
    miss_reason: str | None
    miss_token: int | None
    cache_misses: str
    engine: int | None
    engine_incarnation: int | None
    decode_engine: int | None
    decode_incarnation: int | None
    engine_deaths: int
    router_estimate_tokens: int | None
    seed: int | None
    fault: Fault | None
    completion_kind: Literal["known", "unknown"]
    upstream_usage: str | None
    adapter: str | None
    parent: str | None
    kind: SequenceKind
    batch_id: str | None


FIELD_NAMES: Final = FlatRecord.__struct_fields__
_RENAMED: Final = {
    "engine_incarnation": "incarnation",
    "engine_deaths": "num_engine_deaths",
    "router_estimate_tokens": "router_estimate",
}
_CONVERTED: Final = ("cache_misses", "moved_by_engine")
_ATTRIBUTES: Final = {
    name: attribute
    for name in FIELD_NAMES
    if hasattr(attrs.fields(UsageRecord), attribute := _RENAMED.get(name, name)) and name not in _CONVERTED
}
"""Names in the record of the fields that it has with the same value."""
_ENUMS: Final = (Outcome, FinishReason, Fault, SequenceKind)
_same_values: Final = attrgetter(*_ATTRIBUTES.values())


def flatten(record: UsageRecord) -> dict[str, Value]:
    """Convert a record. Text is cut at MAX_TEXT_CHARS, and characters that databases reject are replaced."""
    misses, said = record.cache_misses, record.upstream_usage
    values = dict(zip(_ATTRIBUTES, map(_flat, _same_values(record)), strict=True))
    for name, count in (("prompt", record.prompt), ("cached", record.cached), ("cache_write", record.cache_write)):
        values[f"{name}_tokens"], values[f"{name}_kind"] = shown(count), kind_of(count)
    return {
        **values,
        **_tiers(record.cached_by_tier),
        "miss_reason": misses[0].reason.value if misses else None,
        "miss_token": misses[0].token if misses else None,
        "cache_misses": " ".join(f"{miss.reason.value}@{miss.token}" for miss in misses[:MAX_MISSES]),
        "moved_by_engine": " ".join(f"{i}:{num}" for i, num in islice(record.moved_by_engine.items(), MAX_MOVED_TO)),
        "completion_kind": "known" if record.knows_completion else "unknown",
        "upstream_usage": said if said is not None and len(said) <= MAX_SAID_CHARS and said.isascii() else None,
    }


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all fields, and of no others."""
    return {name: values.get(name, default) for name, default in DEFAULTS.items()}


def restore(values: Mapping[str, object]) -> UsageRecord:
    """Convert values back to a record. Raises ValueError for values that a newer version wrote, or that are invalid."""
    try:
        flat = msgspec.convert(with_defaults(values), FlatRecord)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    same: dict[str, Any] = {attribute: getattr(flat, name) for name, attribute in _ATTRIBUTES.items()}
    by_tier = {tier: getattr(flat, f"cached_{tier}_tokens") for tier in TIERS}
    return UsageRecord(
        **same,
        prompt=_count(flat.prompt_tokens, flat.prompt_kind),
        cached=_count(flat.cached_tokens, flat.cached_kind),
        cached_by_tier=None if flat.cached_device_tokens is None else by_tier,
        cache_write=_count(flat.cache_write_tokens, flat.cache_write_kind),
        cache_misses=tuple(_miss(word) for word in flat.cache_misses.split()),
        moved_by_engine=dict(_moved(word) for word in flat.moved_by_engine.split()),
        knows_completion=flat.completion_kind == "known",
    )


def _flat(value: Any) -> Any:
    kind = type(value)
    if kind is str:
        # lone surrogates cannot be encoded, and PostgreSQL takes no NUL
        return value[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    if kind is float:
        return value if math.isfinite(value) else 0.0
    return value.value if kind in _ENUMS else value


def _tiers(by_tier: Mapping[str, int] | None) -> dict[str, Value]:
    if by_tier is None:
        return {f"cached_{tier}_tokens": None for tier in TIERS}
    counts = dict.fromkeys(TIERS, 0)
    for tier, count in by_tier.items():
        counts[tier if tier in counts else "unattributed"] += count
    return {f"cached_{tier}_tokens": count for tier, count in counts.items()}


def _count(number: int | None, kind: CountKind) -> Count:
    if kind == "unknown":
        return UNKNOWN
    if number is None:
        raise ValueError(f"no number of a count that is {kind}")
    return Known(number) if kind == "known" else Estimate(number)


def _moved(word: str) -> tuple[int, int]:
    engine_id, _, num_tokens = word.partition(":")
    return int(engine_id), int(num_tokens)


def _miss(word: str) -> CacheMiss:
    reason, _, token = word.partition("@")
    return CacheMiss(MissReason(reason), int(token))


DEFAULTS: Final[Mapping[str, Value]] = flatten(UsageRecord(request_id="", outcome=Outcome.FAILED))
"""The value of a field that a line does not have: an older version had no such field, or it had this value. Must never
change, or old records would change their meaning."""
