"""The schemas of a collection with xgrammar: how many it accepts, how long each takes, and a mask."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import attrs
import numpy as np

from bench.structured.peer import Peer
from bench.structured.schemas import Collection
from bench.structured.validity import Sample
from quipu.actors.grammars.grammar_library import GrammarLibrary

MAX_BYTES = 2048
"""Of a schema: xgrammar takes many seconds for some larger ones."""


@attrs.define
class Beside:
    """What came of the schemas, with quipu's numbers for those that both accept."""

    schemas: int = 0
    accepted: int = 0
    both: int = 0
    valid_instances: int = 0
    valid_allowed: int = 0
    invalid_instances: int = 0
    invalid_allowed: int = 0
    """Of the schemas that it accepts."""
    compile_ms: list[float] = attrs.field(factory=list)
    quipu_compile_ms: list[float] = attrs.field(factory=list)
    mask_us: list[float] = attrs.field(factory=list)
    quipu_mask_us: list[float] = attrs.field(factory=list)

    def summary(self) -> dict[str, Any]:
        counts = {name: value for name, value in attrs.asdict(self).items() if isinstance(value, int)}
        lists = {name: value for name, value in attrs.asdict(self).items() if isinstance(value, list)}
        return counts | {
            f"{name}_{label}": number(value) if value else None
            for name, value in lists.items()
            for label, number in (("p50", statistics.median), ("mean", statistics.fmean), ("max", max))
        }


def measure_beside(library: GrammarLibrary, peer: Peer, collection: Collection, samples: list[Sample]) -> Beside:
    found, by_source = Beside(), {sample.source: sample for sample in samples}
    for entry in collection.entries:
        source = json.dumps(entry.schema)
        if len(source) > MAX_BYTES:
            continue
        found.schemas += 1
        try:
            began = time.perf_counter()
            compiled = peer.compile(source)
        except Exception:  # the kinds differ by what is wrong
            continue
        compile_ms = (time.perf_counter() - began) * 1e3
        found.accepted += 1
        for instance in entry.instances:
            is_allowed = peer.allows(compiled, instance.value)
            if instance.is_valid:
                found.valid_instances += 1
                found.valid_allowed += is_allowed
            else:
                found.invalid_instances += 1
                found.invalid_allowed += is_allowed
        if sample := by_source.get(source):
            found.both += 1
            found.compile_ms.append(compile_ms)
            _measure_masks(library, peer, compiled, sample, found)
    return found


def _measure_masks(library: GrammarLibrary, peer: Peer, compiled: Any, sample: Sample, found: Beside) -> None:
    """Follow an output as far as both allow it."""
    began = time.perf_counter()
    matcher = library.compile(sample.grammar)
    found.quipu_compile_ms.append((time.perf_counter() - began) * 1e3)
    times = peer.mask_times(compiled, sample.token_ids)
    found.mask_us += [seconds * 1e6 for seconds in times]
    words_W = np.zeros(library.num_words, np.uint32)
    for token_id in sample.token_ids[: len(times)]:
        began = time.perf_counter()
        matcher.fill(words_W)
        matcher.consume([token_id])
        found.quipu_mask_us.append((time.perf_counter() - began) * 1e6)
