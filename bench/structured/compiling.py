"""How long schemas take to compile, with another grammar library beside."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.structured.schemas import TIMED
from bench.timing import best_s
from quipu.actors.grammars.grammar_library import GrammarLibrary
from quipu.actors.grammars.grammar_text import grammar_text
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec

if TYPE_CHECKING:  # it may not be installed
    from bench.structured.peer import Peer


def measure_compiling(library: GrammarLibrary, peer: Peer | None, repeats: int) -> list[dict[str, Any]]:
    results = []
    for name, schema in TIMED.items():
        source = json.dumps(schema)
        seconds = best_s(partial(_compile, library, source), repeats)
        beside = None if peer is None else best_s(partial(peer.compile, source), 1) * 1e3
        row = {"schema": name, "bytes": len(source), "compile_ms": seconds * 1e3, "xgrammar_ms": beside}
        results.append(row)
    return results


def _compile(library: GrammarLibrary, source: str) -> None:
    library.compile(grammar_text(GrammarSpec(GrammarKind.JSON_SCHEMA, source, "schema")))
