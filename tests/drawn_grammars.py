"""Draws grammars of each kind, checks and follows them as the server does, and reports the outcomes.

    python -m tests.drawn_grammars [--count 10000] [--seed 0] [--kinds lark regex ...]

A third of the Lark grammars repeat what has to follow them, for which the library searches without end. For each
grammar there must be a verdict; an accepted one gets a mask, or a reason, for every token; one that takes too much
processor time is ended. Whether a grammar is accepted does not matter.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any
from unittest import mock

import attrs
import numpy as np
import trio

from quipu.actors.engine.executor.grammar_entry import MaskLimits
from quipu.actors.engine.executor.grammars import GrammarMasks
from quipu.actors.engine.executor.sequence_grammar import SequenceGrammar
from quipu.actors.grammars.structural_tags import structural_tag_rules
from quipu.actors.grammars.text_values import UnsupportedSchema
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from quipu.actors.messages.outcomes import RequestError
from quipu.actors.messages.sampling import OutputGrammar
from quipu.actors.text_workers import grammar_pool
from quipu.actors.text_workers.grammar_pool import UNAVAILABLE, GrammarPool
from quipu.actors.text_workers.grammar_worker import WorkerSettings
from quipu.actors.tokenizer.prompt_encoder import EncodingOptions
from tests.grammars import EOS, PARAM, endless_later
from tests.tiny import TINY

Rng = random.Random

NUM_TOKENS = 6
"""Drawn from each grammar, and `LATE_TOKENS` from those that have no end later."""
LATE_TOKENS = 60
LETTERS = "abc"
LIMIT_S = 0.025
"""Processor time of a check, and of a mask: less than the server gives, so that many can be drawn."""
TENANTS = 4


# ---------------------------------------------------------------- drawing


def draw_pattern(rng: Rng, depth: int = 3) -> str:
    """Return a pattern, sometimes a wide or a deep one."""
    if depth == 0 or rng.random() < 0.25:
        return rng.choice(
            [rng.choice(LETTERS), "[a-c]", "[^a]", ".", r"\d", r"\w", "é", f"[a-z ]{{{rng.randint(0, 40)}}}", r"\n"]
        )
    inner = draw_pattern(rng, depth - 1)
    return rng.choice(
        [
            lambda: f"({inner}){rng.choice(['*', '+', '?', f'{{{rng.randint(0, 9)},{rng.randint(9, 300)}}}', '{3,}'])}",
            lambda: inner + draw_pattern(rng, depth - 1),
            lambda: f"({inner}|{draw_pattern(rng, depth - 1)})",
            lambda: f"(?i:{inner})",
            lambda: f"({inner}{{{rng.choice([3, 300])}}}){{{rng.choice([2, 65536])}}}",
            lambda: f"({inner})&({draw_pattern(rng, depth - 1)})",
            lambda: f"(?={inner})",
        ]
    )()


def draw_regex(rng: Rng) -> GrammarSpec:
    return _spec(GrammarKind.REGEX, draw_pattern(rng, 4))


def draw_choice(rng: Rng) -> GrammarSpec:
    texts = ["".join(rng.choices(LETTERS + '"\\é\n', k=rng.randint(0, 12))) for _ in range(rng.randint(1, 30))]
    return _spec(GrammarKind.CHOICE, json.dumps(texts))


def _literal(rng: Rng) -> str:
    return json.dumps("".join(rng.choices(LETTERS, k=rng.randint(1, 4))))


def draw_lark(rng: Rng) -> GrammarSpec:
    """Return rules whose terminals may take what has to follow them."""
    rules = [f"r{number}" for number in range(rng.randint(0, 3))]

    def part(depth: int) -> str:
        if depth == 0 or rng.random() < 0.4:
            terminal = f"/{draw_pattern(rng, 2).replace('/', '')}/"
            return rng.choice([_literal(rng), terminal, "T", *rules, f'%regex {{"substring_chars": {_literal(rng)}}}'])
        inner = part(depth - 1)
        return rng.choice(
            [f"({inner}){rng.choice('*+?')}", f"{inner} {part(depth - 1)}", f"({inner} | {part(depth - 1)})"]
        )

    if rng.random() < 0.34:
        letter = rng.choice(LETTERS)
        start = f'/[a-z ]{{{rng.randint(0, 30)}}}/ /{letter}+/ "{letter}{rng.choice(LETTERS)}"'
    else:
        start = part(3)
    lines = [f"start: {start}", *(f"{rule}: {part(2)}" for rule in rules), f"T: /{draw_pattern(rng, 2)}/"]
    return _spec(GrammarKind.LARK, "\n".join(lines))


def draw_gbnf(rng: Rng) -> GrammarSpec:
    rules = ["root", *(f"r{number}" for number in range(rng.randint(0, 3)))]

    def part(depth: int) -> str:
        if depth == 0 or rng.random() < 0.4:
            return rng.choice([_literal(rng), "[a-c]", "[^a]", *rules])
        inner = part(depth - 1)
        many = rng.choice(["*", "+", "?", f"{{{rng.randint(0, 3)},{rng.randint(3, 200)}}}"])
        return rng.choice([f"({inner}){many}", f"{inner} {part(depth - 1)}", f"({inner} | {part(depth - 1)})"])

    return _spec(GrammarKind.LARK, "\n".join(f"{rule} ::= {part(3)}" for rule in rules))


def draw_schema_value(rng: Rng, depth: int = 3) -> Any:
    """Return a schema, sometimes one with keywords that contradict each other."""
    if depth == 0:
        return rng.choice([{}, True, {"type": "integer"}, {"const": "a"}, {"enum": ["a", 1, None]}, {"$ref": "#"}])
    below = depth - 1
    several = [draw_schema_value(rng, below) for _ in range(rng.randint(1, 3))]
    return rng.choice(
        [
            lambda: {"type": "string", "pattern": draw_pattern(rng, 2), "maxLength": rng.randint(0, 400)},
            lambda: {"type": "string", "format": rng.choice(["date", "uuid", "email", "ipv6", "uri"])},
            lambda: {"type": "number", "minimum": rng.randint(-9, 9), "multipleOf": rng.choice([1, 0.01, 7, 1e-9])},
            lambda: {"type": "integer", "minimum": -(10**18), "exclusiveMaximum": 10**18},
            lambda: {"type": "array", "items": several[0], "minItems": rng.randint(0, 3), "maxItems": 500},
            lambda: {"type": "array", "prefixItems": several},
            lambda: {rng.choice(["anyOf", "oneOf", "allOf"]): several},
            lambda: {
                "type": "object",
                "properties": dict(zip(string.ascii_lowercase, several, strict=False)),
                "required": rng.choice([[], ["a"]]),
                "additionalProperties": rng.choice([True, False, several[0]]),
                **rng.choice([{}, {"patternProperties": {draw_pattern(rng, 1): several[0]}}, {"minProperties": 2}]),
            },
            lambda: {"type": "object", "properties": {f"p{n}": several[0] for n in range(rng.choice([3, 60, 600]))}},
        ]
    )()


def draw_schema(rng: Rng) -> GrammarSpec:
    return _spec(GrammarKind.JSON_SCHEMA, json.dumps(draw_schema_value(rng)))


def draw_tags(rng: Rng) -> GrammarSpec | None:
    """Return a structural tag as a grammar; None if it is refused before that."""
    tags = [
        {
            "begin": f"<{'a' * rng.randint(1, 3)}=",
            "content": rng.choice(
                [
                    {"type": "json_schema", "json_schema": draw_schema_value(rng, 2)},
                    {"type": "const_string", "value": "aaa"},
                    {"type": "regex", "pattern": draw_pattern(rng, 2)},
                ]
            ),
            "end": rng.choice(["</a>", ">", "a"]),
        }
        for _ in range(rng.randint(1, 3))
    ]
    value = {"type": "triggered_tags", "triggers": ["<a", "<aa"][: rng.randint(1, 2)], "tags": tags}
    try:
        rules = list(structural_tag_rules({"type": "structural_tag", "format": value}, PARAM))
    except UnsupportedSchema:
        return None
    return _spec(GrammarKind.LARK, "".join(rules))


def draw_late(rng: Rng) -> GrammarSpec:
    """Return a grammar that is found to have no end only after some tokens."""
    return endless_later(f"[a-z ]{{{rng.randint(80, 120)}}}")


DRAWERS: dict[str, Callable[[Rng], GrammarSpec | None]] = {
    "regex": draw_regex,
    "choice": draw_choice,
    "lark": draw_lark,
    "gbnf": draw_gbnf,
    "schema": draw_schema,
    "tags": draw_tags,
    "late": draw_late,
}


def _spec(kind: GrammarKind, source: str) -> GrammarSpec:
    return GrammarSpec(kind, source, PARAM)


# ---------------------------------------------------------------- checking and following


@attrs.define
class Report:
    """The outcomes of the grammars of one kind."""

    verdicts: Counter[str] = attrs.field(factory=Counter)
    num_masks: int = 0
    num_failed: int = 0
    """Outputs that could not continue."""
    num_ended: int = 0
    """Outputs whose process had to be ended."""

    def line(self, kind: str) -> str:
        verdicts = ", ".join(f"{number} {name}" for name, number in sorted(self.verdicts.items()))
        return (
            f"{kind:8} {verdicts}; {self.num_masks} masks, {self.num_failed} outputs could not continue, of which "
            f"{self.num_ended} had to be ended"
        )


class Outcomes:
    """Checks grammars by the pool of the web process, and follows them as an engine does."""

    def __init__(self, pool: GrammarPool, masks: GrammarMasks) -> None:
        self._pool = pool
        self._masks = masks

    async def add(self, spec: GrammarSpec, tenant: str, num_tokens: int, rng: Rng, report: Report) -> None:
        checked = await self._pool.check(spec, EncodingOptions(tenant, PARAM))
        assert checked is not UNAVAILABLE, spec
        if isinstance(checked, RequestError):
            assert PARAM in checked.message and checked.param == PARAM, checked
            slow = "too long" in checked.message
            report.verdicts["ended" if slow else "refused"] += 1
        else:
            report.verdicts["accepted"] += 1
            await trio.to_thread.run_sync(
                self._follow, OutputGrammar(checked, tenant=tenant, owner=tenant), num_tokens, rng, report
            )

    def _follow(self, grammar: OutputGrammar, num_tokens: int, rng: Rng, report: Report) -> None:
        self._masks.prepare(grammar).result(60)
        sequence = SequenceGrammar(grammar, [], ends_early=True)
        for _ in range(num_tokens):
            (mask,) = self._masks.begin([sequence])()
            if isinstance(mask, str):
                report.num_failed += 1
                report.num_ended += "takes too long" in mask or "ends the process" in mask
                return
            report.num_masks += 1
            (allowed,) = np.nonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            going_on = allowed[allowed != EOS]
            if not len(going_on):
                return
            sequence.add_output(int(rng.choice(going_on)))


async def draw_and_follow(kinds: Sequence[str], count: int, seed: int) -> dict[str, Report]:
    """Return the outcomes of `count` drawn grammars of each kind; fewer `late` ones, which take all of their time."""
    source = (TINY / "tokenizer.json").read_bytes()
    reports = {kind: Report() for kind in kinds}
    masks = GrammarMasks(source, (EOS,))
    with (
        closing(masks),
        mock.patch.multiple(grammar_pool, GRACE_S=0.01, FIRST_LANE_S=LIMIT_S),
        mock.patch.object(MaskLimits, "FULL_S", LIMIT_S),
    ):
        async with trio.open_nursery() as nursery:
            pool = GrammarPool(source, WorkerSettings((EOS,), 1 << 17, LIMIT_S))
            await nursery.start(pool.run)
            outcomes = Outcomes(pool, masks)
            for kind in kinds:
                num_tokens = LATE_TOKENS if kind == "late" else NUM_TOKENS
                for number in range(max(1, count // 20) if kind == "late" else count):
                    rng = random.Random(f"{seed} {kind} {number}")
                    if (spec := DRAWERS[kind](rng)) is None:
                        reports[kind].verdicts["refused"] += 1
                    else:
                        await outcomes.add(spec, f"tenant {number % TENANTS}", num_tokens, rng, reports[kind])
            nursery.cancel_scope.cancel()
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.drawn_grammars")
    parser.add_argument("--count", type=int, default=10_000, help="grammars of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=list(DRAWERS), default=list(DRAWERS))
    arguments = parser.parse_args()
    began_s = time.monotonic()
    for kind, report in trio.run(draw_and_follow, arguments.kinds, arguments.count, arguments.seed).items():
        print(report.line(kind))
    print(f"{time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
