"""The lines of the write-ahead file: what they contain, and that no change goes unnoticed."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.ledger.entries import (
    GROWTH_BYTES,
    MAX_LINE_BYTES,
    NO_HASH,
    Chain,
    EntryKind,
    admitted_line,
    parse_line,
)
from quipu.actors.ledger.fields import (
    DEFAULTS,
    FIELD_NAMES,
    MAX_MISSES,
    MAX_MOVED_TO,
    MAX_SAID_CHARS,
    TIERS,
    flatten,
    restore,
)
from quipu.actors.ledger.schema import records
from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.messages.counts import UNKNOWN, Estimate, Known
from quipu.actors.messages.outcomes import Fault, FinishReason, Outcome
from quipu.actors.messages.scheduler import SequenceKind
from quipu.actors.messages.usage_record import UsageRecord
from tests.actors.ledger.ledgers import T0, record_of, so_far_of

texts = st.text(max_size=300) | st.just("\x01" * 300) | st.just("\ud800\0")
numbers = st.integers(0, 2**62)
times = st.floats(0, 1e11) | st.just(float("nan"))
counts = st.builds(Known, numbers) | st.builds(Estimate, numbers) | st.just(UNKNOWN)
misses = st.lists(st.builds(CacheMiss, st.sampled_from(MissReason), numbers), max_size=40).map(tuple)
anything = st.builds(
    UsageRecord,
    request_id=texts,
    client_request_id=st.none() | texts,
    idempotency_key=st.none() | texts,
    idempotency_digest=st.none() | texts,
    retry_of=st.none() | texts,
    tenant=texts,
    key_id=st.none() | texts,
    model=texts,
    endpoint=texts,
    received_at=times,
    admitted_at=st.none() | times,
    first_token_at=st.none() | times,
    closed_at=times,
    outcome=st.sampled_from(Outcome),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    num_choices=numbers,
    prompt=counts,
    cached=counts,
    cached_by_tier=st.none() | st.fixed_dictionaries(dict.fromkeys(TIERS, numbers)),
    cache_write=counts,
    created_5m_tokens=numbers,
    created_1h_tokens=numbers,
    completion_tokens=numbers,
    reasoning_tokens=numbers,
    computed_tokens=numbers,
    restored_tokens=numbers,
    recomputed_tokens=numbers,
    moved_tokens=numbers,
    moved_by_engine=st.dictionaries(numbers, numbers, max_size=MAX_MOVED_TO + 1),
    draft_tokens=numbers,
    accepted_draft_tokens=numbers,
    accepted_prediction_tokens=numbers,
    rejected_prediction_tokens=numbers,
    disputed=st.booleans(),
    cache_misses=misses,
    engine=st.none() | numbers,
    incarnation=st.none() | numbers,
    decode_engine=st.none() | numbers,
    decode_incarnation=st.none() | numbers,
    num_engine_deaths=numbers,
    router_estimate=st.none() | numbers,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    fault=st.none() | st.sampled_from(Fault),
    knows_completion=st.booleans(),
    adapter=st.none() | texts,
    parent=st.none() | texts,
    upstream_usage=st.none() | st.text('a"\\{\x7f', max_size=MAX_SAID_CHARS),
)


@given(anything)
def test_records_survive_a_line(record: UsageRecord) -> None:
    """Any record can be restored from its line, with bounded and storable text; no line exceeds the limit."""
    line = Chain("srv").close(T0, record).data
    assert len(line) <= MAX_LINE_BYTES
    entry = parse_line(line.removesuffix(b"\n"))
    assert entry is not None and entry.kind is EntryKind.CLOSED
    assert {**DEFAULTS, **entry.values} == flatten(record)
    back = entry.record()
    assert flatten(back) == flatten(record)
    assert back.prompt == record.prompt and back.cached == record.cached and back.cache_write == record.cache_write
    assert back.cache_misses == record.cache_misses[:MAX_MISSES]
    assert back.cached_by_tier == record.cached_by_tier
    assert list(back.moved_by_engine.items()) == list(record.moved_by_engine.items())[:MAX_MOVED_TO]


@given(anything, anything)
def test_closing_fits_the_reserved_room(first: UsageRecord, last: UsageRecord) -> None:
    """A closing is at most GROWTH_BYTES longer than its open entry, whatever happens in between."""
    same: tuple[str, ...] = ("request_id", "client_request_id", "idempotency_key", "idempotency_digest", "retry_of")
    same += ("tenant", "key_id", "model", "adapter", "parent", "endpoint")
    last = attrs.evolve(last, **{name: getattr(first, name) for name in same})
    opened = admitted_line("srv-0123456789abcdef", T0, first)
    chain = Chain("srv-0123456789abcdef")
    chain.num_entries = 2**62
    assert len(chain.close(T0, last).data) <= len(opened.data) + GROWTH_BYTES


def test_every_field_of_a_record_is_kept() -> None:
    """A field added to the record must be added to entries and schema too, or it would be lost."""
    different = record_of("r")
    defaults = UsageRecord(request_id="", outcome=Outcome.FAILED)
    for field in attrs.fields(UsageRecord):
        other = {
            "outcome": Outcome.CANCELLED,
            "finish_reason": FinishReason.LENGTH,
            "cache_misses": (CacheMiss(MissReason.EVICTED, 3),),
            "cached_by_tier": dict.fromkeys(TIERS, 1),
            "moved_by_engine": {3: 48},
            "disputed": True,
            "knows_completion": False,
            "fault": Fault.ENGINE_DIED,
            "kind": SequenceKind.SCORE,
        }.get(field.name)
        if other is None:
            kind = str(field.type)
            other = Known(77) if "Count" in kind else "text" if "str" in kind else 7.5 if "float" in kind else 7
        changed = attrs.evolve(different, **{field.name: other})
        assert getattr(restore(flatten(changed)), field.name) == other, field.name
    assert set(flatten(defaults)) == set(FIELD_NAMES)
    chain = ("server", "number", "hash", "previous", "entry", "ledger", "position")
    assert set(records.c.keys()) == {*FIELD_NAMES, *chain, "recovered"}


def test_chain() -> None:
    """Chained entries are numbered from 0 and each has the hash of the one before it."""
    chain = Chain("srv")
    lines = [chain.start(T0, {"version": "1"}), *(chain.close(T0, record_of(f"r{i}")) for i in range(3))]
    entries = [parse_line(line.data.removesuffix(b"\n")) for line in (*lines, chain.stop(T0, {"counters": None}))]
    previous = NO_HASH
    for number, entry in enumerate(entries):
        assert entry is not None and entry.number == number and entry.previous == previous
        previous = entry.hash


def test_any_changed_byte_is_detected() -> None:
    """Changing any byte of a line makes it unreadable."""
    line = Chain("srv").close(T0, record_of("r")).data.removesuffix(b"\n")
    assert parse_line(line) is not None
    for at in range(len(line)):
        changed = line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :]
        assert parse_line(changed) is None
    assert parse_line(line[:-1]) is None and parse_line(b"") is None


def test_open_entry_is_not_chained() -> None:
    """An open entry is deleted after its closing, so the chain must not depend on it."""
    entry = parse_line(admitted_line("srv", T0, so_far_of("r")).data.removesuffix(b"\n"))
    assert entry is not None and entry.kind is EntryKind.ADMITTED
    assert entry.number is None and entry.previous is None
    assert entry.request_id == "r"


def test_longest_closing_fits_the_shortest_open_entry() -> None:
    """A closing with every field at its longest fits the room reserved by the shortest open entry."""
    who: dict[str, Any] = {
        "tenant": "\x01" * 256,
        "key_id": "\x02" * 256,
        "model": "\x03" * 256,
        "adapter": "\x05" * 256,
        "parent": "\x06" * 256,
        "retry_of": "\x04" * 256,
        "endpoint": "/v1/completions",
        "kind": SequenceKind.EMBED,
    }
    opened = admitted_line("srv-0123456789abcdef", 0.0, UsageRecord(request_id="r", outcome=Outcome.CANCELLED, **who))
    most, longest = 2**63 - 1, 1_700_000_000.1234567
    numbers = [field.name for field in attrs.fields(UsageRecord) if str(field.type) in ("int", "int | None")]
    times = [field.name for field in attrs.fields(UsageRecord) if str(field.type) in ("float", "float | None")]
    assert len(numbers) >= 9 and len(times) == 4
    record = UsageRecord(
        request_id="r",
        outcome=Outcome.CANCELLED,
        finish_reason=FinishReason.LENGTH,
        prompt=Estimate(most),
        cached=Estimate(most),
        cached_by_tier=dict.fromkeys(TIERS, most),
        cache_write=Estimate(most),
        disputed=True,
        cache_misses=(CacheMiss(MissReason.NEEDS_PROMPT_LOGPROBS, most),) * (MAX_MISSES + 1),
        moved_by_engine={most - index: most for index in range(MAX_MOVED_TO + 1)},
        fault=Fault.ENGINE_DIED,
        knows_completion=False,
        upstream_usage='"' * MAX_SAID_CHARS,
        **who,
        **dict.fromkeys(numbers, most),
        **dict.fromkeys(times, longest),
    )
    defaulted = {name for name, value in flatten(record).items() if value == DEFAULTS[name]}
    assert defaulted == {"client_request_id", "idempotency_key", "idempotency_digest", "batch_id"}, (
        "only fields that never change after admission may be left out"
    )
    chain = Chain("srv-0123456789abcdef")
    chain.num_entries = most
    assert len(chain.close(longest, record).data) <= len(opened.data) + GROWTH_BYTES


def test_defaults_never_change() -> None:
    """Lines leave out defaults, so another default would change the meaning of old records."""
    zero: tuple[str, ...] = (
        "created_5m_tokens",
        "created_1h_tokens",
        "completion_tokens",
        "reasoning_tokens",
        "computed_tokens",
    )
    zero += ("restored_tokens", "recomputed_tokens", "moved_tokens", "num_choices", "engine_deaths")
    zero += ("draft_tokens", "accepted_draft_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    expected: dict[str, Any] = dict.fromkeys(FIELD_NAMES) | dict.fromkeys(zero, 0)
    expected |= {"request_id": "", "tenant": "default", "model": "", "endpoint": "", "outcome": "failed"}
    expected |= {"received_at": 0.0, "closed_at": 0.0, "disputed": False, "cache_misses": "", "moved_by_engine": ""}
    expected |= {"prompt_kind": "unknown", "cached_kind": "unknown", "cache_write_kind": "unknown"}
    expected |= {"completion_kind": "known", "kind": "generate"}
    assert expected == DEFAULTS


def test_rejected_record_is_short() -> None:
    """The line of a rejected request contains only who sent it, when, and how it ended."""
    record = record_of("r" * 28, outcome=Outcome.REJECTED, admitted_at=None, first_token_at=None, num_choices=0)
    nothing: dict[str, Any] = {"prompt": UNKNOWN, "cached": UNKNOWN, "cached_by_tier": None, "cache_write": UNKNOWN}
    record = attrs.evolve(record, **nothing, completion_tokens=0, computed_tokens=0, cache_misses=(), incarnation=None)
    entry = parse_line(Chain("srv").close(T0, record).data.removesuffix(b"\n"))
    assert entry is not None
    assert set(entry.values) == {
        "request_id", "tenant", "key_id", "model", "endpoint", "received_at", "closed_at", "outcome"
    }  # fmt: skip
