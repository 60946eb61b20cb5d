"""A usage record as flat named values, as entries, database rows and exports contain it.

There is one list of names, in one order. `flatten` converts a record and `restore` converts it back. Used everywhere in
this package; does no I/O.

What must always hold: every field of `UsageRecord` is included; text is bounded and can be stored by any database.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from ..messages.block_manager import CacheMiss, MissReason
from ..messages.counts import UNKNOWN, Count, Estimate, Known, kind_of, shown
from ..messages.outcomes import Fault, FinishReason, Outcome
from ..messages.usage_record import UsageRecord

Value = str | int | float | bool | None
Values = Mapping[str, Value]

MAX_TEXT_CHARS: Final = 256
"""The web layer has its own limits; the reserved room relies on this one."""
MAX_SAID_CHARS: Final = 1024
"""Of the usage that an upstream reports; of a longer one nothing is kept."""
MAX_MISSES: Final = 32
"""Of a list of prompts, only the first ones have their cache miss recorded."""
TIERS: Final = ("device", "host", "disk", "remote", "unattributed")

FIELD_NAMES: Final = (
    "request_id",
    "client_request_id",
    "idempotency_key",
    "idempotency_digest",
    "retry_of",
    "tenant",
    "key_id",
    "model",
    "endpoint",
    "received_at",
    "admitted_at",
    "first_token_at",
    "closed_at",
    "outcome",
    "finish_reason",
    "num_choices",
    "prompt_tokens",
    "prompt_kind",
    "cached_tokens",
    "cached_kind",
    *(f"cached_{tier}_tokens" for tier in TIERS),
    "cache_write_tokens",
    "cache_write_kind",
    "created_5m_tokens",
    "created_1h_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "computed_tokens",
    "restored_tokens",
    "recomputed_tokens",
    "disputed",
    "miss_reason",
    "miss_token",
    "cache_misses",
    "engine",
    "engine_incarnation",
    "engine_deaths",
    "router_estimate_tokens",
    "seed",
    "fault",
    "completion_kind",
    "upstream_usage",
)


def flatten(record: UsageRecord) -> dict[str, Value]:
    """Convert a record. Text is cut at MAX_TEXT_CHARS, and characters that databases reject are replaced."""
    first_miss = record.cache_misses[0] if record.cache_misses else None
    values: dict[str, Value] = {
        "request_id": _text(record.request_id),
        "client_request_id": _text(record.client_request_id),
        "idempotency_key": _text(record.idempotency_key),
        "idempotency_digest": _text(record.idempotency_digest),
        "retry_of": _text(record.retry_of),
        "tenant": _text(record.tenant),
        "key_id": _text(record.key_id),
        "model": _text(record.model),
        "endpoint": _text(record.endpoint),
        "received_at": _time(record.received_at),
        "admitted_at": _time(record.admitted_at),
        "first_token_at": _time(record.first_token_at),
        "closed_at": _time(record.closed_at),
        "outcome": record.outcome.value,
        "finish_reason": None if record.finish_reason is None else record.finish_reason.value,
        "num_choices": record.num_choices,
        "prompt_tokens": shown(record.prompt),
        "prompt_kind": kind_of(record.prompt),
        "cached_tokens": shown(record.cached),
        "cached_kind": kind_of(record.cached),
        "cache_write_tokens": shown(record.cache_write),
        "cache_write_kind": kind_of(record.cache_write),
        "created_5m_tokens": record.created_5m_tokens,
        "created_1h_tokens": record.created_1h_tokens,
        "completion_tokens": record.completion_tokens,
        "reasoning_tokens": record.reasoning_tokens,
        "computed_tokens": record.computed_tokens,
        "restored_tokens": record.restored_tokens,
        "recomputed_tokens": record.recomputed_tokens,
        "disputed": record.disputed,
        "miss_reason": None if first_miss is None else first_miss.reason.value,
        "miss_token": None if first_miss is None else first_miss.token,
        "cache_misses": " ".join(f"{m.reason.value}@{m.token}" for m in record.cache_misses[:MAX_MISSES]),
        "engine": record.engine,
        "engine_incarnation": record.incarnation,
        "engine_deaths": record.num_engine_deaths,
        "router_estimate_tokens": record.router_estimate,
        "seed": record.seed,
        "fault": None if record.fault is None else record.fault.value,
        "completion_kind": "known" if record.knows_completion else "unknown",
        "upstream_usage": _said(record.upstream_usage),
    }
    values.update(_tiers(record.cached_by_tier))
    return values


def restore(values: Mapping[str, object]) -> UsageRecord:
    """Convert values back to a record. Raises ValueError for values that a newer version wrote, or that are invalid."""
    values = {**DEFAULTS, **values}
    device = values["cached_device_tokens"]
    return UsageRecord(
        request_id=_str(values["request_id"]),
        client_request_id=_opt_str(values["client_request_id"]),
        idempotency_key=_opt_str(values["idempotency_key"]),
        idempotency_digest=_opt_str(values["idempotency_digest"]),
        retry_of=_opt_str(values["retry_of"]),
        tenant=_str(values["tenant"]),
        key_id=_opt_str(values["key_id"]),
        model=_str(values["model"]),
        endpoint=_str(values["endpoint"]),
        received_at=_float(values["received_at"]),
        admitted_at=_opt_float(values["admitted_at"]),
        first_token_at=_opt_float(values["first_token_at"]),
        closed_at=_float(values["closed_at"]),
        outcome=Outcome(_str(values["outcome"])),
        finish_reason=None if values["finish_reason"] is None else FinishReason(_str(values["finish_reason"])),
        num_choices=_int(values["num_choices"]),
        prompt=_count(values["prompt_tokens"], values["prompt_kind"]),
        cached=_count(values["cached_tokens"], values["cached_kind"]),
        cached_by_tier=None if device is None else {tier: _int(values[f"cached_{tier}_tokens"]) for tier in TIERS},
        cache_write=_count(values["cache_write_tokens"], values["cache_write_kind"]),
        created_5m_tokens=_int(values["created_5m_tokens"]),
        created_1h_tokens=_int(values["created_1h_tokens"]),
        completion_tokens=_int(values["completion_tokens"]),
        reasoning_tokens=_int(values["reasoning_tokens"]),
        computed_tokens=_int(values["computed_tokens"]),
        restored_tokens=_int(values["restored_tokens"]),
        recomputed_tokens=_int(values["recomputed_tokens"]),
        disputed=bool(values["disputed"]),
        cache_misses=tuple(_miss(word) for word in _str(values["cache_misses"]).split()),
        engine=_opt_int(values["engine"]),
        incarnation=_opt_int(values["engine_incarnation"]),
        num_engine_deaths=_int(values["engine_deaths"]),
        router_estimate=_opt_int(values["router_estimate_tokens"]),
        seed=_opt_int(values["seed"]),
        fault=None if values["fault"] is None else Fault(_str(values["fault"])),
        knows_completion=_is_known(values["completion_kind"]),
        upstream_usage=_opt_str(values["upstream_usage"]),
    )


def _tiers(by_tier: Mapping[str, int] | None) -> dict[str, Value]:
    if by_tier is None:
        return {f"cached_{tier}_tokens": None for tier in TIERS}
    counts = dict.fromkeys(TIERS, 0)
    for tier, count in by_tier.items():
        counts[tier if tier in counts else "unattributed"] += count
    return {f"cached_{tier}_tokens": count for tier, count in counts.items()}


def _text(text: str | None) -> str | None:
    if text is None:
        return None
    # lone surrogates cannot be encoded, and PostgreSQL takes no NUL
    return text[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _said(text: str | None) -> str | None:
    return text if text is not None and len(text) <= MAX_SAID_CHARS and text.isascii() else None


def _is_known(kind: object) -> bool:
    if kind not in ("known", "unknown"):
        raise ValueError(f"invalid kind of count: {kind!r}")
    return kind == "known"


def _time(seconds: float | None) -> float | None:
    return seconds if seconds is None or math.isfinite(seconds) else 0.0


def _count(number: object, kind: object) -> Count:
    match kind:
        case "known":
            return Known(_int(number))
        case "estimate":
            return Estimate(_int(number))
        case "unknown":
            return UNKNOWN
    raise ValueError(f"invalid kind of count: {kind!r}")


def _miss(word: str) -> CacheMiss:
    reason, _, token = word.partition("@")
    return CacheMiss(MissReason(reason), int(token))


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not a string: {value!r}")
    return value


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"not an integer: {value!r}")
    return value


def _float(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise ValueError(f"not a number: {value!r}")
    return float(value)


def _opt_str(value: object) -> str | None:
    return None if value is None else _str(value)


def _opt_int(value: object) -> int | None:
    return None if value is None else _int(value)


def _opt_float(value: object) -> float | None:
    return None if value is None else _float(value)


DEFAULTS: Final[Values] = flatten(UsageRecord(request_id="", outcome=Outcome.FAILED))
"""The value of a field that a line does not have: an older version had no such field, or it had this value. Must never
change, or old records would change their meaning."""
