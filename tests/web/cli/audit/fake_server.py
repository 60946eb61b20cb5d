"""A server with a prefix cache, in memory and on trio's clock: truthful by default, with a dial for each lie.

It is a transport of the HTTP client, so that an audit speaks to it as to any server, and sleeping costs nothing.
Its truth has dials too: block size, pages of one token, replicas, eviction, caches that promise nothing, retries.
"""

from __future__ import annotations

import json
import random
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import attrs
import httpx2
import trio

LIES = (
    "doubled_by_preemption", "zero_dropped", "length_guess", "per_choice", "decode_side", "router_estimate",
    "missing_in_streams", "usage_twice", "more_than_prompt", "negative", "true", "fraction", "text", "last_of_list",
    "input_has_cached", "warm_up_of_choices", "start_differs", "count_grows", "claims_hits", "hides_hits",
    "counter_doubles",
)  # fmt: skip
PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}


@attrs.frozen
class Truth:
    """How the server works. Whatever is chosen here, its numbers are true."""

    block_size: int = 16
    num_blocks: int = 10_000
    template: int = 12
    """Tokens before a chat's text."""
    apis: frozenset[str] = frozenset(PATHS.values())
    reporting: frozenset[str] = frozenset(PATHS.values())
    """APIs that say cached tokens."""
    is_flat: bool = False
    """Say them under DeepSeek's name."""
    least: int = 0
    """Shorter hits count as none."""
    step: int = 1
    """Hits are rounded down to it."""
    num_replicas: int = 1
    missing: float = 0.0
    """How often a cached prompt is not found all the same."""
    retried: float = 0.0
    """How often a gateway has sent the prompt once before, without an answer."""
    busy: float = 0.0
    """How often a request is answered with 429 at first."""
    others: float = 0.0
    """How often another client's prompt comes between."""
    letters: int = 4
    digits: int = 1
    """A token's share of a word and of a number."""
    prefill_s: float = 0.0004
    jitter_s: float = 0.01
    knows_salts: bool = True
    keeps_keys_apart: bool = True
    has_choices: bool = True
    takes_ids: bool = True
    has_running_usage: bool = False
    has_placeholder_start: bool = False
    waits_for_siblings: bool = True
    continues_prompts: bool = False
    """The model goes on counting where the prompt ends, so that its output is a prefix of the next prompt."""


@attrs.define(eq=False)
class Body(httpx2.AsyncByteStream):
    pieces: AsyncGenerator[bytes]
    on_closed: Callable[[], object]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self.pieces:
            yield piece

    async def aclose(self) -> None:
        self.on_closed()
        await self.pieces.aclose()


@attrs.define(eq=False)
class FakeServer(httpx2.AsyncBaseTransport):
    truth: Truth = Truth()
    lie: str = ""
    seed: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    num_open: int = 0
    most_open: int = 0
    bodies: list[dict[str, Any]] = attrs.field(factory=list)
    prompt_counter: int = 0
    cached_counter: int = 0
    _draw: random.Random = attrs.field(init=False)
    _caches: list[OrderedDict[int, None]] = attrs.field(init=False)
    _pending: dict[int, trio.Event] = attrs.field(factory=dict)
    _routed: list[str] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._caches = [OrderedDict() for _ in range(self.truth.num_replicas)]

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await trio.sleep(self._draw.random() * 0.002)
        if request.url.path == "/v1/models":
            return _response(200, {"data": [{"id": "fake"}]})
        if request.url.path == "/metrics":
            text = f'quipu:prompt_tokens_total{{model_name="a b"}} {self.prompt_counter}.0\n'
            return _response(200, f"# HELP x\n{text}quipu:prefix_cache_hits_total {self.cached_counter}\n")
        api = PATHS.get(request.url.path)
        if api not in self.truth.apis or api is None:
            return _response(404, {"error": {"message": "no such path"}})
        body = json.loads(await request.aread())
        self.bodies.append(body)
        if self.truth.keeps_keys_apart:
            body["key"] = request.headers.get("authorization", "")
        if self._chance(self.truth.busy):
            return _response(429, {"error": {"message": "busy"}}, {"retry-after": "1"})
        prompts = self._prompts(api, body)
        if self.lie == "router_estimate":
            body["estimate"] = sum(self._matched(text) for text in self._texts(api, body))
        if body.get("temperature", 0) < 0 or prompts is None:
            return _response(400, {"error": {"message": "refused"}})
        return self._answer(api, body, prompts)

    # ------------------------------------------------------------ the truth

    def _prompts(self, api: str, body: dict[str, Any]) -> list[list[str]] | None:
        texts = self._texts(api, body)
        if any(isinstance(text, list) for text in texts) and not self.truth.takes_ids:
            return None
        head = [] if api == "completions" else ["t"] * self.truth.template
        tail = [] if api == "completions" else ["e"] * 5
        return [[*head, *self._tokens(text), *tail] for text in texts]

    def _texts(self, api: str, body: dict[str, Any]) -> list[Any]:
        if api == "chat":
            return [body["messages"][0]["content"]]
        if api == "messages":
            return [body["messages"][0]["content"][0]["text"]]
        if api == "responses":
            return [body["input"]]
        prompt = body["prompt"]
        return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]

    def _tokens(self, text: Any) -> list[str]:
        if isinstance(text, list):
            return [str(token_id) for token_id in text]
        letters, digits = self.truth.letters, self.truth.digits
        return re.findall(rf" ?[a-z]{{1,{letters}}}| ?[0-9]{{1,{digits}}}| ", text)

    def _keys(self, tokens: Sequence[str], salt: object) -> list[int]:
        size, key, keys = self.truth.block_size, hash(salt), []
        for start in range(0, len(tokens) - size + 1, size):
            key = hash((key, tuple(tokens[start : start + size])))
            keys.append(key)
        return keys

    def _look_up(self, keys: Sequence[int], cache: OrderedDict[int, None], num_tokens: int) -> int:
        found = 0
        for key in keys[: (num_tokens - 1) // self.truth.block_size]:
            if key not in cache:
                break
            cache.move_to_end(key)
            found += self.truth.block_size
        found -= found % self.truth.step
        return found if found >= self.truth.least and not self._chance(self.truth.missing) else 0

    def _commit(self, keys: Sequence[int], cache: OrderedDict[int, None]) -> None:
        for key in keys:
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > self.truth.num_blocks:
            cache.popitem(last=False)

    async def _compute(self, tokens: list[str], salt: object, output: list[str]) -> int:
        """Compute a prompt, and return how many of its tokens were cached."""
        if self._chance(self.truth.others):
            other = [str(self._draw.random()) for _ in range(400)]
            self._commit(self._keys(other, None), self._draw.choice(self._caches))
            self.prompt_counter += 400
        cache = self._draw.choice(self._caches)
        keys = self._keys(tokens, salt)
        first = keys[0] if keys else 0
        if self._chance(self.truth.retried):
            self._commit(keys, cache)
        while self.truth.waits_for_siblings and first in self._pending:
            await self._pending[first].wait()
        done = self._pending[first] = trio.Event()
        try:
            found = self._look_up(keys, cache, len(tokens))
            num_computed = len(tokens) - (0 if self.lie == "claims_hits" else found)
            await trio.sleep(num_computed * self.truth.prefill_s + self._draw.expovariate(1 / self.truth.jitter_s))
            self._commit(self._keys([*tokens, *output[:-1]], salt), cache)
        finally:
            done.set()
            if self._pending.get(first) is done:
                del self._pending[first]
        return found

    # ------------------------------------------------------------ answers

    def _answer(self, api: str, body: dict[str, Any], prompts: list[list[str]]) -> httpx2.Response:
        is_stream = bool(body.get("stream"))
        self.num_requests += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        is_closed = False

        def close() -> None:
            nonlocal is_closed
            self.num_open -= not is_closed
            is_closed = True

        pieces = self._stream(api, body, prompts) if is_stream else self._whole(api, body, prompts)
        kind = "text/event-stream" if is_stream else "application/json"
        return httpx2.Response(200, headers={"content-type": kind}, stream=Body(pieces, close))

    async def _counts(self, body: dict[str, Any], prompts: list[list[str]]) -> tuple[int, int, int, int]:
        """Return prompt and cached tokens, choices and tokens of the output."""
        salt = (body.get("cache_salt") if self.truth.knows_salts else None, body.get("key"))
        num_choices = body.get("n", 1) if self.truth.has_choices else 1
        limit = body.get("max_tokens") or body.get("max_output_tokens") or 16
        num_outputs = min(limit, self._draw.randint(1, 8)) if limit < 100 else limit
        others_open = self.num_open
        founds = []
        for tokens in prompts:
            output = self._tokens(" responsibility") if self.truth.continues_prompts else ["o"] * num_outputs
            founds.append(await self._compute(tokens, salt, output[:num_outputs]))
        prompt = sum(map(len, prompts))
        self.num_tokens += prompt + num_choices * num_outputs
        self.prompt_counter += prompt
        self.cached_counter += sum(founds) * (2 if self.lie == "counter_doubles" else 1)
        cached = self._lied(sum(founds), founds, prompt, num_choices, others_open, body)
        if self.lie == "per_choice":
            prompt, cached = prompt * num_choices, cached * num_choices
        return prompt, cached, num_choices, num_outputs

    def _usage(self, api: str, counts: tuple[int, int, int, int], is_stream: bool) -> dict[str, Any]:
        prompt, cached, num_choices, num_outputs = counts
        value: Any = {"negative": -cached, "true": True, "fraction": cached + 0.5, "text": str(cached)}.get(
            self.lie, cached
        )
        is_said = api in self.truth.reporting and not (self.lie == "missing_in_streams" and is_stream)
        is_said = is_said and not (self.lie == "zero_dropped" and cached == 0)
        if api == "messages":
            rest = prompt if self.lie == "input_has_cached" else prompt - cached
            said = {"cache_read_input_tokens": value, "cache_creation_input_tokens": 0} if is_said else {}
            return {"input_tokens": rest if is_said else prompt, **said, "output_tokens": num_outputs}
        kinds = ("input", "output") if api == "responses" else ("prompt", "completion")
        usage = {f"{kinds[0]}_tokens": prompt, f"{kinds[1]}_tokens": num_outputs * num_choices}
        if is_said and self.truth.is_flat and api != "responses":
            return {**usage, "prompt_cache_hit_tokens": value}
        return {**usage, f"{kinds[0]}_tokens_details": {"cached_tokens": value}} if is_said else usage

    async def _whole(self, api: str, body: dict[str, Any], prompts: list[list[str]]) -> AsyncIterator[bytes]:
        counts = await self._counts(body, prompts)
        answer: dict[str, Any] = {"usage": self._usage(api, counts, False)}
        if api in ("chat", "completions"):
            answer["choices"] = [{"index": i, "text": "o"} for i in range(counts[2] * len(prompts))]
        yield json.dumps(answer).encode()

    async def _stream(self, api: str, body: dict[str, Any], prompts: list[list[str]]) -> AsyncIterator[bytes]:
        if api == "chat":
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None})
        counts = await self._counts(body, prompts)
        usage, num_outputs = self._usage(api, counts, True), counts[3]
        if api == "messages":
            start = {**usage, "output_tokens": 0}
            if self.lie == "start_differs":
                start |= {"input_tokens": counts[0], "cache_read_input_tokens": 0}
            if self.truth.has_placeholder_start:
                start = {"input_tokens": 0, "output_tokens": 0}
            yield _event({"type": "message_start", "message": {"usage": start}})
        for number in range(1, num_outputs + 1):
            await trio.sleep(0.005)
            chunk: dict[str, Any] = {"type": "content_block_delta", "delta": {"text": "o"}}
            if api in ("chat", "completions"):
                chunk = {"choices": [{"index": 0, "text": "o", "delta": {"content": "o"}}], "usage": None}
                if self.truth.has_running_usage:
                    chunk["usage"] = {**usage, "completion_tokens": number}
            yield _event({"type": "response.output_text.delta"} if api == "responses" else chunk)
        if api == "responses":
            yield _event({"type": "response.completed", "response": {"usage": usage}})
            return
        if api == "messages":
            yield _event({"type": "message_delta", "usage": usage})
            yield _event({"type": "message_stop"})
            return
        end: dict[str, Any] = {
            "choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}],
            "usage": None,
        }
        if self.lie == "usage_twice" or self.truth.has_running_usage:
            end["usage"] = usage
        yield _event(end)
        yield _event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    # ------------------------------------------------------------ the lies

    def _lied(
        self, true: int, founds: list[int], prompt: int, num_choices: int, num_open: int, body: dict[str, Any]
    ) -> int:
        match self.lie:
            case "doubled_by_preemption" if num_open > 1 and body.get("max_tokens", 0) > 100:
                return true + prompt - 1
            case "length_guess" if true:
                return prompt * 9 // 10 // 16 * 16
            case "hides_hits":
                return 0
            case "decode_side":
                return (prompt - 1) // 16 * 16
            case "router_estimate":
                return int(body["estimate"])
            case "more_than_prompt" if true:
                return prompt + 7
            case "last_of_list":
                return founds[-1]
            case "warm_up_of_choices" if num_choices > 1:
                return (prompt - 1) // 16 * 16
            case "count_grows" if true:
                return true + 512
        return true

    def _matched(self, text: Any) -> int:
        """Return an estimate from characters, of what was sent here before, computed or not."""
        text = text if isinstance(text, str) else " ".join(map(str, text))
        matched = 0
        for routed in self._routed:
            while matched < len(text) and routed[: matched + 32] == text[: matched + 32] and matched < len(routed):
                matched += 32
        self._routed.append(text)
        return len(self._tokens(text)) * min(matched, len(text)) // len(text)

    def _chance(self, share: float) -> bool:
        return share > 0 and self._draw.random() < share


def _event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def _response(status: int, content: Any, headers: dict[str, str] | None = None) -> httpx2.Response:
    async def pieces() -> AsyncIterator[bytes]:
        yield content.encode() if isinstance(content, str) else json.dumps(content).encode()

    return httpx2.Response(status, headers=headers, stream=Body(pieces(), lambda: None))
