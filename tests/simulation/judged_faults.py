"""Rules about faults: what records say of them, which processes they name, and what a full disk holds up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tests.simulation.evidence import WEB_ACTORS, Evidence
from tests.simulation.judged_time import PROMPTLY_S

OF_STEPS = ("fail passes", "no memory")
"""Faults for which an engine fails requests and lives on."""
OF_WRITING = ("writes fail", "short writes", "syncs fail")
EPSILON_S = 1e-6


def fault_is_told(evidence: Evidence) -> Iterator[str]:
    """A record says how the server failed its request, if it did, and a fault of that kind has happened."""
    seen = evidence.seen
    if evidence.is_quiet and seen.deaths:
        yield f"engines died at {seen.deaths} s, and nothing had happened to them"
    may_have_died = seen.num_engine_deaths or evidence.happened("drain engine")
    web_crashed = any(point.actor in WEB_ACTORS for point in seen.crashed)
    for arrival, watched, record in evidence.recorded():
        name, fault, outcome = arrival.request_id, record.get("fault"), record["outcome"]
        is_possible = {
            None: True,
            "engine_died": bool(may_have_died),
            "step_failed": evidence.happened(*OF_STEPS),
        }
        if not is_possible.get(fault, False) or (fault is not None and outcome != "failed"):
            yield f"{name} is {outcome}, and its fault is {fault}"
        if evidence.resumes_nothing and record.get("engine_deaths"):
            yield f"{name} has gone on after a death, and was to fail"
        error = watched.ends[0].error if watched.ends else None
        if fault is None and error is not None and error[0] == "internal" and not web_crashed:
            yield f"{name} was told {error[1]!r}, and its record has no fault"


def incarnations_are_told(evidence: Evidence) -> Iterator[str]:
    """A process is of one engine, and none is named that had died before another of its engine admitted something."""
    engine_of: dict[int | None, int] = {}
    admissions: list[tuple[int, float, int, str]] = []
    for arrival, watched, record in evidence.recorded():
        for engine_field, field in (("engine", "engine_incarnation"), ("decode_engine", "decode_incarnation")):
            engine, incarnation = record.get(engine_field), record.get(field)
            if (engine is None) != (incarnation is None):
                yield f"{arrival.request_id} has {engine_field} {engine}, and {field} {incarnation}"
            elif engine is not None and engine_of.setdefault(incarnation, engine) != engine:
                yield f"{arrival.request_id} has {field} {incarnation}, which is of engine {engine_of[incarnation]}"
        if record.get("engine") is not None and record.get("admitted_at") is not None:
            admitted_s = watched.opened_at + record["admitted_at"] - record["received_at"]
            admissions.append((record["engine"], admitted_s, record["engine_incarnation"], arrival.request_id))
    for (engine, at, incarnation, name), (next_engine, next_at, later, _) in pairwise(sorted(admissions)):
        if engine == next_engine and at + EPSILON_S < next_at and later < incarnation:
            yield f"{name} was admitted by incarnation {incarnation} of engine {engine}, and then others by {later}"


def room_is_kept(evidence: Evidence) -> Iterator[str]:
    """On a disk that is full, what was admitted is written at once: its room was reserved."""
    if not evidence.happened("disk full") or evidence.happened(*OF_WRITING):
        return
    if any(point.actor == "accountant" for point in evidence.seen.crashed):
        return
    for arrival, watched, record in evidence.recorded():
        closed_s = watched.opened_at + record["closed_at"] - record["received_at"]
        if watched.has_finished and not arrival.read_pause_s and watched.ended_at > closed_s + PROMPTLY_S:
            yield f"{arrival.request_id} was closed at {closed_s:g}, and told so at {watched.ended_at:g} s"
