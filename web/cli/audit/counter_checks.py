"""Prometheus' counters beside what clients were told.

They are compared only while nobody else uses the server: counters that move between two looks without a request of ours
mean that others do, and then nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import attrs
import httpx2

from .answer_reader import MAX_BYTES
from .auditor import Auditor, unanswered
from .bounded_body import read_at_most
from .exchange import Exchange
from .verdicts import Trial

IDLE_S = 1.0
SETTLING_S = 10.0
_MAX_COUNT = 2.0**53
_OK = 200


@attrs.frozen
class Names:
    prompt: str
    cached: str


KNOWN = (
    Names("quipu:prompt_tokens_total", "quipu:prefix_cache_hits_total"),
    Names("vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"),
    Names("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
)
"""Counters of prompt tokens and of cached ones, of servers that have both."""


@attrs.frozen
class Counted:
    prompt: int
    cached: int

    def since(self, before: Counted) -> Counted:
        return Counted(self.prompt - before.prompt, self.cached - before.cached)


def read_counters(text: str) -> Counted | None:
    """Return the sums over all labels; None if the page has no counters that are known."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line.partition(" ")[0] else line.partition(" ")
        value = rest.rpartition("}")[2].split()
        if line.startswith("#") or not value:
            continue
        try:
            sums[name] = sums.get(name, 0.0) + float(value[0])
        except ValueError:
            continue
    return _known(sums)


def _known(sums: Mapping[str, float]) -> Counted | None:
    for names in KNOWN:
        prompt, cached = sums.get(names.prompt), sums.get(names.cached)
        if prompt is not None and cached is not None and 0 <= prompt < _MAX_COUNT and 0 <= cached < _MAX_COUNT:
            return Counted(int(prompt), int(cached))
    return None


@attrs.define(eq=False)
class CounterCheck:
    auditor: Auditor
    api: str
    url: str
    _http: httpx2.AsyncClient

    async def attempt(self) -> Trial:
        """Send three prompts while the server is idle, and compare."""
        before = await self._idle()
        if isinstance(before, Trial):
            return before
        prompt = self.auditor.new_prompt(self.api)
        sent = [*await self.auditor.asks(self.api, prompt, 2)]
        sent.append(await self.auditor.ask(self.api, self.auditor.grown(self.api, prompt, 200)))
        if (trial := unanswered(sent)) is not None:
            return trial
        told = Counted(sum(one.prompt or 0 for one in sent), sum(one.cached or 0 for one in sent))
        risen = await self._risen(before, told)
        if isinstance(risen, Trial):
            return risen
        return judge_counters(told, risen, sent)

    async def _idle(self) -> Counted | Trial:
        """Return the counters, unless they move by themselves."""
        first = await self._look()
        await anyio.sleep(IDLE_S)
        second = await self._look()
        if first is None or second is None:
            known = ", ".join(names.cached for names in KNOWN)
            return Trial(None, f"none of {known} at {self.url}", is_offered=False)
        if first != second:
            return Trial(None, "the counters move while nothing is sent: others use the server")
        return second

    async def _risen(self, before: Counted, told: Counted) -> Counted | Trial:
        """Return by how much the counters have risen once they stand still."""
        deadline = anyio.current_time() + SETTLING_S
        while True:
            now = await self._idle()
            if isinstance(now, Trial):
                return now
            risen = now.since(before)
            if risen == told or anyio.current_time() > deadline:
                return risen

    async def _look(self) -> Counted | None:
        try:
            with anyio.fail_after(self.auditor.asker.timeout_s):
                async with self._http.stream("GET", self.url, headers=self.auditor.asker.target.headers) as answer:
                    if answer.status_code != _OK:
                        return None
                    content = await read_at_most(answer, MAX_BYTES)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError):
            return None
        return None if content is None else read_counters(content.decode("utf-8", "replace"))


def judge_counters(told: Counted, risen: Counted, sent: list[Exchange]) -> Trial:
    text = (
        f"cached: clients {told.cached}, counter {risen.cached}; prompts: clients {told.prompt}, counter {risen.prompt}"
    )
    shown = tuple(sent)
    if risen == told:
        return Trial(True, text, shown)
    if risen.prompt != told.prompt:
        return Trial(None, f"{text}: of one replica, or of others' requests as well", shown)
    return Trial(False, text, shown)
