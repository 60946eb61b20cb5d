"""What the rules of the oracle look at: the plan, what clients saw, the ledger's bytes and the text of the metrics."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import attrs

from tests.simulation.arrival import AFTERWARDS, BLOCK, Arrival
from tests.simulation.expected import Answer, answer_to
from tests.simulation.seen import Seen, Watched

HEAD = 64
"""Characters of the hash before a ledger line's text."""
FIRST_HASH = "0" * HEAD
WEB_ACTORS = ("tokenizer", "router", "detokenizer", "accountant")
KEEP_CACHE = frozenset(
    {
        "disk full",
        "writes fail",
        "short writes",
        "syncs fail",
        "clock step",
        "repeat report",
        "slow passes",
        "slow copies",
        "lose mask",
    }
)
"""Faults after which an engine has computed what it would have computed without them."""
Record = dict[str, Any]


@attrs.frozen
class Sample:
    """One line of the metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


@attrs.frozen(slots=False)
class Evidence:
    seen: Seen
    records: dict[str, list[Record]]
    """Closing records of the ledger, by request."""
    admitted: set[str]
    """Requests of which the ledger says that they will have a record."""
    damage: list[str]
    """What is wrong with the ledger's lines."""
    samples: dict[str, list[Sample]]
    """By name."""

    @classmethod
    def of(cls, seen: Seen) -> Evidence:
        records, admitted, damage = _read_ledger(seen.ledger)
        return cls(seen, records, admitted, damage, _read_metrics(seen.metrics))

    # ------------------------------------------------------------ what happened

    @property
    def engine(self) -> dict[str, Any]:
        """The server's settings."""
        return self.seen.plan.setup.engine

    @property
    def resumes_nothing(self) -> bool:
        """Whether the requests of an engine that dies fail."""
        return bool(self.engine.get("on_engine_death") == "fail")

    @property
    def is_quiet(self) -> bool:
        """Whether no fault has happened."""
        return not self.seen.applied

    @cached_property
    def keeps_cache(self) -> bool:
        """Whether no fault has taken anything from an engine."""
        if self.seen.num_engine_deaths or any(point.actor not in WEB_ACTORS for point in self.seen.crashed):
            return False
        return all(fault.kind in KEEP_CACHE for fault in self.seen.happened)

    @cached_property
    def has_room(self) -> bool:
        """Whether the blocks of one engine hold everything that is asked for at once."""
        sizes = [
            -(-(len(part.prompt) + part.max_tokens + 8) // BLOCK) * part.num_choices + part.num_choices
            for arrival in self.seen.plan.all_arrivals
            for part in arrival.parts
        ]
        return bool(sum(sizes) < self.engine["num_blocks"] * (1 - self.engine["watermark"]) - 1)

    def happened(self, *kinds: str) -> bool:
        return any(fault.kind in kinds for fault in self.seen.happened)

    def last_reset(self, watched: Watched) -> float:
        """Return when the cache was last reset before a request came."""
        return max((at for at in self.seen.resets if at < watched.opened_at), default=-1.0)

    # ------------------------------------------------------------ requests

    def requests(self) -> Iterator[tuple[Arrival, Watched]]:
        """Yield the requests that were opened."""
        for arrival in self.seen.plan.all_arrivals:
            watched = self.seen.watched.get(arrival.number)
            if watched is not None and watched.refused is None:
                yield arrival, watched

    def recorded(self) -> Iterator[tuple[Arrival, Watched, Record]]:
        """Yield those that have a record."""
        for arrival, watched in self.requests():
            if (record := self.record(arrival)) is not None:
                yield arrival, watched, record

    def record(self, arrival: Arrival) -> Record | None:
        found = self.records.get(arrival.request_id, [])
        return found[0] if found else None

    def answer(self, arrival: Arrival, output: int = 0) -> Answer:
        part, choice = divmod(output, arrival.num_choices)
        return answer_to(arrival.parts[part], tuple(self.engine["eos_token_ids"]), choice, self.digest_of(arrival))

    def digest_of(self, arrival: Arrival) -> str:
        return self.seen.adapters.get(arrival.adapter, "")

    def is_too_long(self, arrival: Arrival) -> bool:
        return any(len(part.prompt) >= int(self.engine["max_model_len"]) for part in arrival.parts)

    def domain(self, arrival: Arrival) -> tuple[str, str, str]:
        """Return what two requests must have in common to share blocks."""
        return arrival.tenant, arrival.salt, arrival.adapter

    def sequences(self, arrival: Arrival) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of each choice whose KV a pass has written: all but the last that is drawn."""
        for part in arrival.parts:
            for choice in range(arrival.num_choices):
                yield part.prompt + self.answer(part, choice).token_ids[:-1]

    def computed(self, arrival: Arrival) -> tuple[tuple[int, ...], ...]:
        """Return the same with what an engine may compute before it hears that a stop string or a call is complete."""
        which = arrival.number, arrival.part, len(arrival.further)
        if which not in self._computed:
            self._computed[which] = tuple(self.sequences(attrs.evolve(arrival, stop=(), max_calls=None)))
        return self._computed[which]

    @cached_property
    def _computed(self) -> dict[tuple[int, int, int], tuple[tuple[int, ...], ...]]:
        """By an arrival's number, part and further prompts."""
        return {}

    # ------------------------------------------------------------ metrics

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all labels but these."""
        return sum(
            sample.value
            for sample in self.samples.get(name, ())
            if all(sample.labels.get(key) == value for key, value in labels.items())
        )


def is_afterwards(arrival: Arrival) -> bool:
    return arrival.number >= AFTERWARDS


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many tokens two sequences begin with in common."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


def _read_ledger(data: bytes) -> tuple[dict[str, list[Record]], set[str], list[str]]:
    records: dict[str, list[Record]] = {}
    admitted: set[str] = set()
    damage: list[str] = []
    last, count = FIRST_HASH, 0
    for line in data.split(b"\n"):
        if not (line := line.strip(b"\0")):
            continue
        digest, text = line[:HEAD].decode("ascii", "replace"), line[HEAD + 1 :]
        if hashlib.sha256(text).hexdigest() != digest:
            damage.append(f"a line that is not one: {line[:100]!r}")
            continue
        entry = json.loads(text)
        if entry["kind"] == "admitted":
            request_id = entry["record"]["request_id"]
            if request_id in records:
                damage.append(f"{request_id} was admitted after its end")
            admitted.add(request_id)
            continue
        if (entry["number"], entry["previous"]) != (count, last):
            damage.append(f"entry {entry['number']} does not follow entry {count - 1}")
        last, count = digest, entry["number"] + 1
        if entry["kind"] == "closed":
            records.setdefault(entry["record"]["request_id"], []).append(entry["record"])
    return records, admitted, damage


def _read_metrics(text: str) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {}
    for name, labels, value in re.findall(r"^quipu:(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
        sample = Sample(name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))
        samples.setdefault(name, []).append(sample)
    return samples
