"""The checks of one API that are judged by ladders of prompts, and those that compare streams with whole responses."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .auditor import SLACK, Auditor, unanswered
from .exchange import Exchange
from .ladder import (
    Rungs,
    climb,
    judge_cold,
    judge_counts,
    judge_once,
    judge_prefix,
    judge_total,
    judge_warm,
    judge_zero,
)
from .time_check import judge_times
from .verdicts import ENOUGH, Finding, Trial, Verdict, settle

_LARGEST_BLOCK = 512
"""Counts of one prompt may differ by a block, where two kinds of servers share the requests."""
_LEAST = 2
"""Ladders of each kind, before any doubt."""
_SMALLER = 0.25
"""The length of the prompts with which a fault is shown, if it shows there too."""
_SHOWN_SMALLER = ("zero", "cold", "counts", "total", "prefix")


async def climb_all(auditor: Auditor, api: str, is_stream: bool) -> list[Rungs]:
    """Climb ladders until their verdicts are sure, and keep the verdicts."""
    auditor.say(f"{api}{', streamed' if is_stream else ''}: prompts that repeat and grow")
    ladders: list[Rungs] = []
    while len(ladders) < (ENOUGH if _is_doubted(ladders, auditor.floor(api)) else _LEAST):
        ladders.append(await climb(auditor, api, is_stream))
        if auditor.is_over or unanswered_at_all(ladders[-1].all()):
            break
    exchanges = [exchange for rungs in ladders for exchange in rungs.all()]
    if unanswered_at_all(exchanges) and (trial := unanswered(exchanges)) is not None:
        auditor.findings.append(settle("reported", api, is_stream, [trial]))
        return []
    floor = auditor.floor(api)
    found = {
        "zero": [judge_zero(rungs) for rungs in ladders],
        "cold": [judge_cold(rungs, floor) for rungs in ladders],
        "counts": [judge_counts(exchanges)],
        "total": [judge_total(rungs) for rungs in ladders],
        "warm": [judge_warm(rungs) for rungs in ladders],
        "prefix": [judge_prefix(rungs) for rungs in ladders],
    }
    if is_stream:
        found |= {"once": [judge_once(exchanges)], "time": [judge_times(ladders)]}
    settled = [settle(check, api, is_stream, trials) for check, trials in found.items()]
    if any(finding.verdict is Verdict.FALSE and finding.check in _SHOWN_SMALLER for finding in settled):
        settled = _with_smaller(settled, await climb(auditor, api, is_stream, _SMALLER), floor)
    auditor.findings += settled
    return ladders


def _with_smaller(findings: Sequence[Finding], rungs: Rungs, floor: int) -> list[Finding]:
    """Show what is false with shorter prompts, where it is false of them as well."""
    trials = {
        "zero": judge_zero(rungs),
        "cold": judge_cold(rungs, floor),
        "counts": judge_counts(rungs.all()),
        "total": judge_total(rungs),
        "prefix": judge_prefix(rungs),
    }

    def shown(finding: Finding) -> Finding:
        trial = trials.get(finding.check)
        if finding.verdict is not Verdict.FALSE or trial is None or trial.is_held is not False:
            return finding
        reason = f"{finding.reason}; shorter, as below: {trial.reason}"
        return attrs.evolve(finding, reason=reason, shown_by=tuple(trial.shown_by))

    return [shown(finding) for finding in findings]


def unanswered_at_all(exchanges: Sequence[Exchange]) -> bool:
    return not any(exchange.is_answered for exchange in exchanges)


def judge_reported(api: str, plain: Sequence[Rungs], streamed: Sequence[Rungs]) -> list[Finding]:
    """Judge whether repeated prompts have a count: a stream has to have what the whole response has."""
    findings = []
    has_count = {False: _are_counted(plain), True: _are_counted(streamed)}
    for is_stream, ladders in ((False, plain), (True, streamed)):
        if not ladders:
            continue
        said = [exchange for rungs in ladders for exchange in rungs.warms if exchange.is_answered]
        counted = [exchange for exchange in said if exchange.cached is not None]
        if said and len(counted) == len(said):
            trial = Trial(True, f"in {counted[0].said.where}", (counted[0],))
        elif is_stream and len(said) >= ENOUGH and not counted and has_count[False]:
            what = "a usage without cached tokens" if said[0].usages else "no usage, which was asked for"
            trial = Trial(False, f"{what}; the whole response has them", (said[0],), is_certain=True)
        else:
            trial = Trial(None, f"in {len(counted)} of {len(said)} responses", tuple(said[:1]))
        findings.append(settle("reported", api, is_stream, [trial]))
    return findings


def _are_counted(ladders: Sequence[Rungs]) -> bool:
    warms = [exchange for rungs in ladders for exchange in rungs.warms]
    return bool(warms) and all(exchange.cached is not None for exchange in warms)


async def compare_streams(auditor: Auditor, api: str) -> Trial:
    """Send one prompt by turns streamed and not."""
    prompt = auditor.new_prompt(api)
    first = await auditor.asks(api, prompt, 2)
    turns = [await auditor.ask(api, prompt, is_stream=bool(turn % 2)) for turn in range(1, 7)]
    if (trial := unanswered([*first[1:], *turns])) is not None:
        return trial
    streamed, plain = turns[0::2], turns[1::2]
    return judge_pairs(plain, streamed, "streamed")


def judge_pairs(plain: Sequence[Exchange], other: Sequence[Exchange], name: str) -> Trial:
    """Judge counts of one cached prompt, asked for in two ways by turns.

    After the first turn both ways find all of it, so both counts stay the same. A small difference may be a template's.
    """
    ours, theirs = {exchange.cached or 0 for exchange in plain}, {exchange.cached or 0 for exchange in other}
    one, two = plain[-1], other[-1]
    if len(ours) > 1 or len(theirs) > 1:
        return Trial(None, "counts of one prompt vary: evicted in between, or on several replicas", (one, two))
    count, their_count = one.cached or 0, two.cached or 0
    reason = f"{count} of {one.prompt}; {name} {their_count} of {two.prompt}"
    if count == their_count and count:
        return Trial(True, reason, (one, two))
    is_same_prompt = one.prompt is not None and one.prompt == two.prompt
    if is_same_prompt and count and their_count and abs(count - their_count) > _LARGEST_BLOCK + SLACK:
        return Trial(False, reason, (one, two))
    if not (count or their_count):
        return Trial(None, "no hit was seen", (one, two))
    return Trial(None, reason, (one, two))


def _is_doubted(ladders: Sequence[Rungs], floor: int) -> bool:
    for rungs in ladders:
        trials = (judge_zero(rungs), judge_cold(rungs, floor), judge_prefix(rungs), judge_total(rungs))
        if any(trial.is_held is False for trial in trials):
            return True
    return False
