"""One audit, from the first probe to the last finding: which checks are run, in which order, for which APIs."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import attrs
import httpx2

from .asker import Asker
from .auditor import Auditor, Scale
from .choice_checks import try_choices, try_list
from .counter_checks import CounterCheck
from .isolation_checks import try_key, try_salt
from .ladder import Rungs, grow
from .ladder_checks import climb_all, compare_streams, judge_reported
from .load_checks import try_disconnect, try_parallel, try_pressure, try_refused
from .probing import find_first_model, probe
from .request_body import Target
from .time_check import Times, times_of
from .variant_checks import compare_apis, compare_max_tokens, compare_stop
from .verdicts import CHECKS, Finding, Trial, settle

Attempt = Callable[[Auditor, str], Awaitable[Trial]]
_EACH_API: Mapping[str, Attempt] = {
    "blocks": grow,
    "streamed": compare_streams,
    "stop": compare_stop,
    "max_tokens": compare_max_tokens,
    "parallel": try_parallel,
    "disconnect": try_disconnect,
    "refused": try_refused,
    "salt": try_salt,
}
_OF_APIS: Mapping[str, tuple[Attempt, tuple[str, ...]]] = {
    "choices": (try_choices, ("chat", "completions")),
    "list": (try_list, ("completions",)),
}
_TEXT_APIS = ("chat", "responses", "messages")


@attrs.frozen(kw_only=True)
class Plan:
    """What the user wants to know."""

    target: Target
    apis: tuple[str, ...]
    metrics_url: str | None = None
    has_pressure: bool = False
    prompt_tokens: int
    prompt_format: str = "auto"
    budget: int
    concurrency: int
    timeout_s: float
    max_time_s: float


@attrs.frozen
class Outcome:
    target: Target
    """With the model that was found, and as the server wants its requests."""
    findings: tuple[Finding, ...]
    times: Mapping[str, Times]
    """By API, of the streams."""
    prompt_tokens: int
    num_requests: int
    spent: int
    stopped: str | None
    """Why the audit ended early."""


async def run_audit(
    plan: Plan,
    http: httpx2.AsyncClient,
    say: Callable[[str], object] = lambda text: None,
    draw: random.Random | None = None,
) -> Outcome:
    """Run the audit. Raises NothingToAudit."""
    target = plan.target
    if not target.model:
        target = attrs.evolve(target, model=await find_first_model(http, target))
    draw = draw or random.SystemRandom()
    scale = Scale()
    asker = Asker(target, http, plan.budget, plan.timeout_s, plan.concurrency, plan.max_time_s, scale.estimate)
    say(f"{target.model}: looking which APIs answer")
    probed = await probe(asker, scale, plan.apis, plan.prompt_tokens, plan.prompt_format, draw)
    auditor = Auditor(asker, scale, probed.prompt_tokens, draw, list(probed.findings), say)
    times = await _run_checks(auditor, plan, probed.apis, http)
    return Outcome(
        asker.target,
        tuple(auditor.findings),
        times,
        probed.prompt_tokens,
        asker.num_requests,
        asker.spent,
        None if asker.stopped is None else asker.stopped.message,
    )


async def _run_checks(
    auditor: Auditor, plan: Plan, apis: tuple[str, ...], http: httpx2.AsyncClient
) -> dict[str, Times]:
    times: dict[str, Times] = {}
    counting = []
    for api in apis:
        plain = await climb_all(auditor, api, is_stream=False)
        streamed = await climb_all(auditor, api, is_stream=True)
        auditor.findings += judge_reported(api, plain, streamed)
        if streamed:
            times[api] = times_of(streamed)
        if _has_counts(plain):
            counting.append(api)
    await _run_variants(auditor, plan, apis, counting)
    if counting:
        await _run_once(auditor, plan, counting[0], http)
    return times


async def _run_variants(auditor: Auditor, plan: Plan, apis: tuple[str, ...], counting: list[str]) -> None:
    each_api = dict(_EACH_API)
    if plan.target.other_key is not None:
        each_api["key"] = try_key
    for api in apis:
        checks = dict(each_api)
        checks |= {check: attempt for check, (attempt, those) in _OF_APIS.items() if api in those}
        for check, attempt in checks.items():
            if api in counting:
                await auditor.check(check, api, partial(attempt, auditor, api))
            else:
                auditor.findings.append(settle(check, api, None, [Trial(None, "the server does not say")]))
    comparable = [api for api in _TEXT_APIS if api in counting]
    for other in comparable[1:]:
        await auditor.check("apis", other, partial(compare_apis, auditor, other, comparable[0]))


async def _run_once(auditor: Auditor, plan: Plan, api: str, http: httpx2.AsyncClient) -> None:
    """Run what says something about the server, whatever the API: with the first one that has counts."""
    if plan.has_pressure:
        await auditor.check("pressure", api, partial(try_pressure, auditor, api))
    if plan.metrics_url is not None:
        counters = CounterCheck(auditor, api, plan.metrics_url, http)
        await auditor.check("counters", api, counters.attempt)
    offered = {"key": "--other-key", "pressure": "--pressure", "counters": "--metrics-url"}
    asked = {finding.check for finding in auditor.findings}
    for check in CHECKS:
        if check in offered and check not in asked:
            trial = Trial(None, f"only with {offered[check]}", is_offered=False)
            auditor.findings.append(settle(check, api, None, [trial]))


def _has_counts(ladders: list[Rungs]) -> bool:
    return any(exchange.cached is not None for rungs in ladders for exchange in rungs.all())
