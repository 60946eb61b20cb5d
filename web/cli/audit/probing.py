"""What has to be known before the first check: the model, which APIs answer, and the tokens of prompts."""

from __future__ import annotations

import random

import anyio
import attrs
import httpx2
import msgspec

from ..command_output import printable
from .answer_reader import MAX_BYTES
from .asker import Asker
from .auditor import Scale
from .bounded_body import read_at_most
from .drawn_prompts import Prompt, draw_prompt
from .exchange import Ask, Exchange
from .request_body import Target, headers_of
from .verdicts import Finding, Verdict

_BARE_UNITS, _MEASURED_UNITS = 2, 40
_LEAST_TOKENS = 100
_PATIENCE_S = 30.0
_OK = 200


class NothingToAudit(Exception):
    """There is no server, or nothing that could be asked. The message says what to change."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@attrs.frozen
class Probed:
    apis: tuple[str, ...]
    findings: tuple[Finding, ...]
    """Of the APIs that are not there."""
    prompt_tokens: int


async def find_first_model(http: httpx2.AsyncClient, target: Target) -> str:
    """Return the first model of `GET /v1/models`. Raises NothingToAudit."""
    url = f"{target.url}/v1/models"
    try:
        with anyio.fail_after(_PATIENCE_S):
            async with http.stream("GET", url, headers=headers_of(Ask("chat", ()), target)) as answer:
                if answer.status_code != _OK:
                    key = ": give --key" if answer.status_code in (401, 403) else "; name a model with --model"
                    raise NothingToAudit(f"GET {url} was answered {answer.status_code}{key}")
                content = await read_at_most(answer, MAX_BYTES)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise NothingToAudit(f"GET {url}: {printable(str(error) or type(error).__name__)[:200]}") from error
    try:
        models = msgspec.json.decode(content or b"", type=_Models).data
    except (msgspec.DecodeError, RecursionError) as error:
        raise NothingToAudit(f"{url} is not a list of models; name one with --model") from error
    if not models:
        raise NothingToAudit(f"{url} lists no model; name one with --model")
    return models[0].id


async def probe(
    asker: Asker, scale: Scale, apis: tuple[str, ...], wanted: int, ids: str, draw: random.Random
) -> Probed:
    """Find out which APIs answer, and how many tokens prompts have. Raises NothingToAudit if none does."""
    findings, answering = [], []
    for api in apis:
        exchange = await _first_answer(asker, scale, api, ids, draw)
        if exchange.failure is None:
            answering.append(api)
            scale.bare[api] = exchange.prompt if exchange.prompt is not None else 64
            continue
        verdict = Verdict.NOT_APPLICABLE if exchange.is_refused else Verdict.UNKNOWN
        reason = f"no answer to a short prompt: {exchange.failure.kind}: {exchange.failure.message}"
        findings.append(Finding("reported", api, None, verdict, reason, (exchange,)))
    if not answering:
        raise NothingToAudit("; ".join(f"{finding.api}: {finding.reason}" for finding in findings))
    await _measure(asker, scale, answering, draw)
    tokens = await _find_length(asker, scale, answering[0], wanted, draw)
    return Probed(tuple(answering), tuple(findings), tokens)


async def _first_answer(asker: Asker, scale: Scale, api: str, ids: str, draw: random.Random) -> Exchange:
    """Send a short prompt, in another way if the server refuses it. Some answer whole, some only in streams."""
    if api == "completions" and ids != "text":
        asker.target = attrs.evolve(asker.target, takes_ids=True)
        scale.takes_ids = True
        exchange = await _ask_either(asker, api, draw)
        if exchange.is_answered or ids == "ids":
            return exchange
        asker.target = attrs.evolve(asker.target, takes_ids=False)
        scale.takes_ids = False
    exchange = await _ask_either(asker, api, draw)
    if not exchange.is_refused or exchange.failure is None:
        return exchange
    if api == "chat" and "max_completion_tokens" in exchange.failure.message:
        asker.target = attrs.evolve(asker.target, limit_field="max_completion_tokens")
        return await _ask_either(asker, api, draw)
    if api == "messages" and "cache_control" in exchange.failure.message:
        asker.target = attrs.evolve(asker.target, takes_cache_control=False)
        return await _ask_either(asker, api, draw)
    return exchange


async def _ask_either(asker: Asker, api: str, draw: random.Random) -> Exchange:
    ask = Ask(api, (draw_prompt(_BARE_UNITS, draw),))
    exchange = await asker.ask(ask)
    if exchange.failure is not None and exchange.failure.kind == "not_json":
        streamed = await asker.ask(attrs.evolve(ask, is_stream=True))
        return streamed if streamed.is_answered else exchange
    return exchange


async def _measure(asker: Asker, scale: Scale, apis: list[str], draw: random.Random) -> None:
    """Measure the tokens of texts, with the first API that takes text and counts."""
    for api in apis:
        if scale.is_ids(api):
            continue
        few = draw_prompt(_BARE_UNITS, draw)
        asked: list[Prompt] = [few, few.grown(_MEASURED_UNITS), few.with_tail(_MEASURED_UNITS, draw)]
        counts = [(await asker.ask(Ask(api, (prompt,)))).prompt for prompt in asked]
        bare, body, tail = counts
        if bare is not None and body is not None and tail is not None and min(body, tail) > bare:
            scale.per_unit = (body - bare) / _MEASURED_UNITS
            scale.per_tail_unit = (tail - bare) / _MEASURED_UNITS
            return


async def _find_length(asker: Asker, scale: Scale, api: str, wanted: int, draw: random.Random) -> int:
    """Return how long prompts may be: shorter than wanted if the model's context is."""
    tokens = wanted
    while tokens > _LEAST_TOKENS:
        longest = draw_prompt(scale.units(api, round(tokens * 1.7)), draw)
        exchange = await asker.ask(Ask(api, (longest,)))
        if not exchange.is_refused:
            break
        tokens //= 2
    return tokens
