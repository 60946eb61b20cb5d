"""How many schemas of a collection are accepted, and whether the outputs that they allow are valid.

Each schema is checked as a request's is. Of an accepted one, some outputs are drawn and given to a validator; a cut
output is continued until it ends, so that it is the beginning of a valid one if the whole is valid. Where a collection
says which values a schema allows, so does the grammar: missing valid values make it too strict, invalid ones are wrong.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs

from bench.structured.outputs import Drawer, OutputFailed
from bench.structured.pattern_examples import examples_of
from bench.structured.schemas import Collection, Entry
from quipu.actors.grammars.grammar_check import GrammarChecker
from quipu.actors.grammars.grammar_library import GrammarLibrary
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from quipu.actors.messages.outcomes import RequestError

MAX_BYTES = 131_072
"""Of a schema, as `--max-grammar-bytes` has it by default."""
MAX_SECONDS = 0.5
"""To compile it, as `--grammar-timeout` has it by default."""
MAX_TOKENS = 96
MAX_MORE = 2048
ATTEMPTS = 4
_KEYWORD = re.compile(
    r"the keyword `([^`]+)`|Expected positive integer for '([^']+)'|(oneOf|patternProperty|min/maxProperties|multipleOf"
    r"|Unsatisfiable|Resource|regex parse error|float range|circular references|at most \d+ bytes)"
)
_REASONS = {
    "Unsatisfiable": "no value matches",
    "Resource": "$ref to another document",
    "circular references": "$ref, circular, beside other keywords",
    f"at most {MAX_BYTES} bytes": f"longer than {MAX_BYTES} bytes",
    "patternProperty": "patternProperties that overlap",
    "regex parse error": "pattern",
    "float range": "minimum, maximum",
    "min/maxProperties": "minProperties, maxProperties",
}
MakeValidator = Callable[[Any], Callable[[Any], bool]]


@attrs.frozen
class Sample:
    """An accepted schema with what the engine compiles, and an output."""

    source: str
    grammar: str
    token_ids: list[int]


@attrs.define
class Report:
    """What came of a collection."""

    collection: str
    schemas: int = 0
    accepted: int = 0
    refused: Counter[str] = attrs.field(factory=Counter)
    outputs: int = 0
    ended: int = 0
    ended_valid: int = 0
    cut: int = 0
    cut_prefixes: int = 0
    """Cut outputs whose continuation was valid."""
    unfinished: int = 0
    """Cut outputs that had not ended after all attempts to continue them."""
    unchecked: int = 0
    """Outputs that the validator could not judge."""
    valid_instances: int = 0
    valid_allowed: int = 0
    invalid_instances: int = 0
    invalid_allowed: int = 0
    wrong: list[str] = attrs.field(factory=list)
    """Each output, or value of the collection, that is allowed and should not be."""
    admission_ms: list[float] = attrs.field(factory=list)
    samples: list[Sample] = attrs.field(factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the numbers, with shares of what could be judged."""
        numbers = attrs.asdict(self, filter=attrs.filters.exclude("admission_ms", "samples"))
        times = sorted(self.admission_ms) or [0.0]
        return numbers | {
            "refused": dict(self.refused.most_common()),
            "valid_share": _share(self.ended_valid, self.ended),
            "prefix_share": _share(self.cut_prefixes, self.cut - self.unfinished),
            "admission_ms_p50": times[len(times) // 2],
            "admission_ms_max": times[-1],
        }


def measure_validity(
    library: GrammarLibrary,
    drawer: Drawer,
    collection: Collection,
    make_validator: MakeValidator | None,
    num_draws: int,
) -> Report:
    report = Report(collection.name)
    checker = GrammarChecker(library, MAX_BYTES, MAX_SECONDS)
    for entry in collection.entries:
        source = json.dumps(entry.schema)
        report.schemas += 1
        began = time.perf_counter()
        grammar = checker.check(GrammarSpec(GrammarKind.JSON_SCHEMA, source, "schema"))
        if isinstance(grammar, RequestError):
            report.refused[_reason(grammar.message)] += 1
            continue
        report.admission_ms.append((time.perf_counter() - began) * 1e3)
        report.accepted += 1
        _count_instances(library, drawer, entry, grammar, report)
        is_valid = entry.check or (None if make_validator is None else make_validator(entry.schema))
        examples = examples_of(entry.schema)
        outputs = [_count_output(drawer, entry.name, grammar, is_valid, examples, report) for _ in range(num_draws)]
        report.samples.append(Sample(source, grammar, max(outputs, key=len)))
    return report


def _count_instances(library: GrammarLibrary, drawer: Drawer, entry: Entry, grammar: str, report: Report) -> None:
    for instance in entry.instances:
        text = json.dumps(instance.value, separators=(",", ":"), ensure_ascii=False)
        is_allowed = library.compile(grammar).accepts(drawer.token_ids(text))
        if instance.is_valid:
            report.valid_instances += 1
            report.valid_allowed += is_allowed
        else:
            report.invalid_instances += 1
            report.invalid_allowed += is_allowed
            if is_allowed:
                report.wrong.append(f"{entry.name}: {instance.name}: {text[:200]}")


def _count_output(
    drawer: Drawer,
    name: str,
    grammar: str,
    is_valid: Callable[[Any], bool] | None,
    examples: list[str],
    report: Report,
) -> list[int]:
    """Draw an output, count what it is, and return its tokens."""
    report.outputs += 1
    try:
        output = drawer.draw(grammar, MAX_TOKENS)
        whole = output if output.has_ended else drawer.finished(grammar, output, MAX_MORE, ATTEMPTS, examples)
    except OutputFailed as error:
        report.ended += 1
        report.wrong.append(f"{name}: {error}")
        return []
    if whole is None:
        report.cut += 1
        report.unfinished += 1
        return output.token_ids
    verdict = _verdict(drawer.text(whole), is_valid)
    if verdict is None:
        report.unchecked += 1
    elif output.has_ended:
        report.ended += 1
        report.ended_valid += verdict
    else:
        report.cut += 1
        report.cut_prefixes += verdict
    if verdict is False:
        report.wrong.append(f"{name}: {drawer.text(whole)[:200]}")
    return output.token_ids


def _verdict(text: str, is_valid: Callable[[Any], bool] | None) -> bool | None:
    """Return whether a text is JSON that matches. None: the validator is missing, or cannot judge it."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if is_valid is None:
        return None
    try:
        return is_valid(value)
    except Exception:  # of many kinds: a pattern that Python's `re` cannot read, a reference it does not follow
        return None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _reason(message: str) -> str:
    message = message.partition(": ")[2] or message
    if found := _KEYWORD.search(message):
        return _REASONS.get(name := found[1] or found[2] or found[3], name)
    return message[:60]
