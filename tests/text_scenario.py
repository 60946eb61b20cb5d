"""Requests of every kind in one runtime, and everything observable about them, for comparison with another run.

Two results are equal if every response (texts, logprobs, calls, usage), every usage record and every counter are equal;
ids, times and drawn seeds are left out, since they differ between servers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import structlog.testing
import trio
import trio.testing

from quipu.kernels.fake import Dials
from tests.crash_scenario import comparable, without_times
from tests.journals import KeptJournal
from tests.prompts import prompt_of
from tests.runtimes import Client, kept_library, small_runtime
from tests.tools.scripted_model import CHAT_TOOLS, END, QUESTION, call, demo_folder
from tests.traps.wire import CHAT, COMPLETIONS, STREAMED, body, over_http, samples, settle

WAVE = 40
"""Requests that run at the same time."""
COUNT = "/v1/messages/count_tokens"
NUM_KINDS = 12
"""Kinds of requests."""
MARKS = range(279, 282)
"""Prompt tokens that decide what the model writes; no prompt has one by chance."""
CHAT_OUTPUT = f"<think>Is it wet there? \N{UMBRELLA}</think>It may rain.{call()}"


@attrs.frozen
class Result:
    """Everything observable about one run."""

    responses: dict[str, Any]
    """By client's id."""
    records: dict[str, dict[str, Any]]
    counters: dict[str, float]


def without_ids(answer: Any) -> Any:
    """Remove what differs between servers, at any depth."""
    if isinstance(answer, list):
        return [without_ids(item) for item in answer]
    if isinstance(answer, dict):
        return {k: without_ids(v) for k, v in answer.items() if k not in ("id", "created")}
    return answer


@asynccontextmanager
async def marked_runtime(**options: Any) -> AsyncIterator[Client]:
    """Open a runtime whose model thinks and calls a tool in chats, and writes other texts after each of `MARKS`."""
    library = kept_library(demo_folder())
    vocabulary = library.tokenizer

    def ids(text: str) -> list[int]:
        encoded = library.encode(text, max_tokens=1 << 20, add_special_tokens=False)
        assert not isinstance(encoded, int)
        return list(encoded)

    replies = {mark: ids(f"Caf\u00e9 {mark} \N{UMBRELLA}: all of it, then STOP here, STO") for mark in MARKS}
    opening, end = (vocabulary.token_to_id(token) for token in ("<|im_start|>", END))
    assert isinstance(opening, int)
    replies[opening] = ids(CHAT_OUTPUT)
    dials = Dials(step_seconds=0.01, replies=replies, eos_token_id=end)
    settings: dict[str, Any] = {"model_path": str(demo_folder()), "eos_token_ids": (end,), "max_num_seqs": 64}
    settings |= {"num_blocks": 4096, "max_model_len": 1024, "max_num_batched_tokens": 4096}
    with structlog.testing.capture_logs():  # rendering thousands of tracebacks takes longer than the kills
        async with small_runtime(dials, **{**settings, **options}) as client:
            yield client


async def run_scenario(num_requests: int, **options: Any) -> Result:
    """Run the scenario in a runtime with these options."""
    journal = KeptJournal()
    responses: dict[str, Any] = {}
    async with marked_runtime(journal=journal, **options) as client:
        http = over_http(client)
        with trio.fail_after(100):
            for first in range(0, num_requests, WAVE):
                async with trio.open_nursery() as nursery:
                    for number in range(first, min(first + WAVE, num_requests)):
                        nursery.start_soon(send, http, number, responses)
                await settle(client)
        counters = comparable(samples(client))
        for name in ("draft_tokens", "accepted_draft_tokens"):
            total = sum(getattr(record, name) for record in journal.closed)
            assert total == counters[f"spec_decode_num_{name.replace('accepted_draft', 'accepted')}_total"]
        return Result(
            responses=responses,
            records={
                str(record.client_request_id): _without_drafts(without_times(record)) for record in journal.closed
            },
            counters={name: value for name, value in counters.items() if not name.startswith("spec_decode_")},
        )


def _without_drafts(record: dict[str, Any]) -> dict[str, Any]:
    """Remove how many tokens were drafted, which depends on what other sequences do in the same steps."""
    return {name: value for name, value in record.items() if not name.endswith("draft_tokens")}


async def send(http: Any, number: int, responses: dict[str, Any]) -> None:
    """Send one request; its number decides of which kind it is."""
    name, prompt = f"r{number}", [*prompt_of(8 + number % 5, seed=number), MARKS[number % 3]]
    chat = {"model": "demo", "max_tokens": 100, "temperature": 0, "tools": CHAT_TOOLS, "cache_salt": name}
    chat["messages"] = QUESTION
    leaves = False
    path, request = COMPLETIONS, body(prompt, max_tokens=4)
    match number % NUM_KINDS:
        case 1:
            request |= STREAMED
        case 2:
            request |= {**STREAMED, "logprobs": 2}
        case 3:
            request |= {"n": 2, "echo": True, "logprobs": 1}
        case 4:
            request |= {"n": 2, "echo": True, "logprobs": 0, "max_tokens": 0}
        case 5:
            request |= {**STREAMED, "stop": ["STOP", "of x"], "max_tokens": 60}
        case 6:
            path, request = CHAT, {**chat, **STREAMED}
        case 7:
            path, request = CHAT, {**chat, "logprobs": True, "top_logprobs": 1}
        case 8:
            request |= {"max_tokens": 5000}
        case 9:
            leaves = True
            request |= {**STREAMED, "max_tokens": 30}
        case 10:
            request |= {"n": 2, "stop": ["it"], "return_token_ids": True, "min_tokens": 2, "max_tokens": 40}
        case 11:
            path, request = COUNT, {"model": "demo", "messages": QUESTION}
    async with http.open("POST", path, request, {"X-Request-Id": name}) as exchange:
        if leaves:
            await exchange.wait_started()
            await exchange.read_some()
            exchange.leave()
            await trio.testing.wait_all_tasks_blocked()
        elif request.get("stream"):
            responses[name] = without_ids(await exchange.chunks())
        else:
            responses[name] = without_ids(await exchange.json())
