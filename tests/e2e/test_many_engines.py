"""Two engines, each a process with a real model, behind one web process: the official clients cannot tell."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from tests.e2e.engine_list import engine_pids, engine_samples, list_engines, wait_all_ready
from tests.e2e.ledger_command import ledger
from tests.e2e.prompts import text_prompt
from tests.e2e.servers import BLOCK, Server, eventually, serving

LONG = 300
"""Tokens of each answer: it takes seconds, and engines die meanwhile."""
VARIED = {"ignore_eos": True, "temperature": 0.9, "seed": 11}
"""Greedy answers of random weights repeat themselves."""
ENGINES = (0, 1)
MOST_ATTEMPTS = 10
STEPS_TO_SPAN = 3
"""After this many reports, every sequence that ran at the first has had a step: one is planned while one runs."""


@attrs.frozen
class Answered:
    """What a client was told."""

    request_id: str | None
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def ask_openai(server: Server, tag: str, salt: str | None, *, streamed: bool) -> Answered:
    with server.client() as client:
        create: Any = client.chat.completions.with_raw_response.create
        arguments: dict[str, Any] = {"stream_options": {"include_usage": True}} if streamed else {}
        raw = create(
            model="demo", messages=[{"role": "user", "content": text_prompt(tag, 60)}], stream=streamed,
            max_completion_tokens=LONG, extra_body={**VARIED, "cache_salt": salt}, **arguments,
        )  # fmt: skip
        answer = raw.parse()
        if streamed:
            chunks = list(answer)
            text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            (usage,) = [chunk.usage for chunk in chunks if chunk.usage is not None]
        else:
            text, usage = answer.choices[0].message.content, answer.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return Answered(raw.headers["x-quipu-request-id"], text, usage.prompt_tokens, cached, usage.completion_tokens)


def ask_anthropic(server: Server, tag: str, salt: str | None, *, streamed: bool) -> Answered:
    with server.anthropic_client() as client:
        arguments: Any = {
            "model": "demo", "messages": [{"role": "user", "content": text_prompt(tag, 60)}], "max_tokens": LONG,
            "extra_body": {**VARIED, "cache_salt": salt},
        }  # fmt: skip
        if streamed:
            with client.messages.stream(**arguments) as stream:
                text = "".join(stream.text_stream)
                message = stream.get_final_message()
            request_id = stream.response.headers["x-quipu-request-id"]
        else:
            message = client.messages.create(**arguments)
            text = "".join(block.text for block in message.content if block.type == "text")
            request_id = message.id.removeprefix("msg_")
    usage = message.usage
    cached, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    return Answered(request_id, text, usage.input_tokens + cached + written, cached, usage.output_tokens)


ASKS: tuple[tuple[Callable[..., Answered], str, bool], ...] = (
    (ask_openai, "first", True),
    (ask_openai, "second", False),
    (ask_anthropic, "third", True),
    (ask_anthropic, "fourth", False),
)


@attrs.define
class Asker:
    """Sends all of `ASKS` at once and keeps the answers."""

    server: Server
    pool: ThreadPoolExecutor
    answers: list[Answered] = attrs.field(factory=list)

    def ask_all(self, salt: str | None) -> list[Future[Answered]]:
        return [self.pool.submit(ask, self.server, tag, salt, streamed=streamed) for ask, tag, streamed in ASKS]

    def finish(self, asked: Iterable[Future[Answered]]) -> list[Answered]:
        """Wait for answers; meanwhile the server must be ready."""
        asked = list(asked)

        def are_done() -> bool:
            assert self.server.is_ready()
            return all(each.done() for each in asked)

        eventually(are_done, "all have their answers")
        found = [each.result() for each in asked]
        self.answers += found
        return found

    def ask_and_run(self, salt: str) -> list[Future[Answered]]:
        """Send all of `ASKS` and return while each engine computes some: each request has had a reported step.

        A request without a reported step is resumed as well, but nothing of it is recomputed. Where this was noticed
        too late, all are finished and sent again.
        """
        for attempt in range(MOST_ATTEMPTS):
            asked = self.ask_all(f"{salt}, attempt {attempt}")
            if self._are_running(asked):
                return asked
            self.finish(asked)
        raise AssertionError(f"{MOST_ATTEMPTS} times, all were answered before both engines were seen to run them")

    def _are_running(self, asked: Sequence[Future[Answered]]) -> bool:
        """Wait until all run or are done; return whether all still ran some steps later."""

        def are_running() -> dict[str, dict[str, float]]:
            found = engine_samples(self.server)
            num_running = sum(its.get("num_requests_running", 0) for its in found.values())
            return found if num_running + sum(each.done() for each in asked) >= len(asked) else {}

        before = eventually(are_running, "the engines run all requests")

        def have_stepped() -> bool:
            now = engine_samples(self.server)
            return any(each.done() for each in asked) or all(
                its["engine_steps_total"] >= before[engine]["engine_steps_total"] + STEPS_TO_SPAN
                for engine, its in now.items()
            )

        eventually(have_stepped, "every request has had its first step")
        running = [its["num_running"] for its in list_engines(self.server)]
        return all(running) and sum(running) == len(asked)


def texts(answers: Iterable[Answered]) -> list[str]:
    return [answer.text for answer in answers]


def check_texts(asker: Asker, asked: Iterable[Future[Answered]], wanted: list[str]) -> None:
    """Check the texts of answers; if some are others, say where they depart, and whether the engines still differ."""
    found = texts(asker.finish(asked))
    if found == wanted:
        return
    same = [
        next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        for one, other in zip(found, wanted, strict=True)
    ]
    again = [texts(asker.finish(asker.ask_all(f"once more, {i}"))) for i in range(3)]
    raise AssertionError(
        f"the first characters that are alike: {same} of {[len(text) for text in wanted]}; asked again: "
        f"{[[one == other for one, other in zip(more, wanted, strict=True)] for more in again]}; "
        f"engines: {list_engines(asker.server)}; texts: {[text[:60] for text in found]}"
    )


def test_engines_die_and_are_drained(tmp_path: Path) -> None:
    """Texts, counts and records are those of a server whose engines survive; a cached prompt hits on its engine."""
    flags = ["--engines", "2", "--num-blocks", "600"]
    with ThreadPoolExecutor(len(ASKS)) as pool:
        with serving(tmp_path, *flags) as server:
            wait_all_ready(server, 2)
            asker = Asker(server, pool)
            first = asker.finish(asker.ask_all(None))
            again = asker.finish(asker.ask_all(None))
            assert texts(again) == texts(first)
            assert [answer.cached_tokens for answer in first] == [0] * len(ASKS)
            assert [answer.cached_tokens for answer in again] == [
                (answer.prompt_tokens - 1) // BLOCK * BLOCK for answer in again
            ]
            for engine_id in ENGINES:
                wait_all_ready(server, 2)
                pids = engine_pids(server)
                asked = asker.ask_and_run(f"engine {engine_id} dies")
                os.kill(pids[engine_id], signal.SIGKILL)
                check_texts(asker, asked, texts(first))
            wait_all_ready(server, 2)
            assert [its["deaths"] for its in list_engines(server)] == [1, 1]

            asked = asker.ask_and_run("engine 0 is drained")
            drained = server.post("/v1/admin/engines/0/drain", {"mode": "hand_over"})
            assert drained.status_code == 202, drained.text
            check_texts(asker, asked, texts(first))
            eventually(lambda: [its["id"] for its in list_engines(server)] == [1], "engine 0 is gone")
            check_books(server, asker.answers, tmp_path)
        (account,) = json.loads(ledger(tmp_path, "reconcile", "--json").stdout)
        assert account["ended"] == "stopped" and account["agrees"]


def check_books(server: Server, answers: list[Answered], folder: Path) -> None:
    """Check that each answer has one record with the same numbers, and that both agree with each engine's counters."""
    metrics, by_engine = server.wait_at_rest(), engine_samples(server)
    exported = ledger(folder, "export", "--format", "jsonl").stdout.splitlines()
    records = {record["request_id"]: record for record in map(json.loads, exported)}
    assert len(exported) == len(records) == len(answers) == len({answer.request_id for answer in answers})
    for answer in answers:
        record = records[answer.request_id]
        told = (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
        assert told == (record["prompt_tokens"], record["cached_tokens"], record["completion_tokens"])
        assert record["outcome"] == "finished" and not record["disputed"]
        assert record["engine"] in ENGINES and record["engine_incarnation"] >= 1
        assert record["router_estimate_tokens"] == answer.cached_tokens, "the router knew what each engine had cached"
        assert answer.completion_tokens == LONG
    assert {record["engine_deaths"] for record in records.values()} == {0, 1}
    for name, field in (
        ("prompt_tokens_total", "prompt_tokens"),
        ("prefix_cache_hits_total", "cached_tokens"),
        ("generation_tokens_total", "completion_tokens"),
        ("recomputed_tokens_total", "recomputed_tokens"),
    ):
        sums = {
            str(engine): sum(its[field] for its in records.values() if its["engine"] == engine) for engine in ENGINES
        }
        assert {engine: by_engine[engine][name] for engine in sums} == sums
        assert metrics[name] == sum(sums.values())
    assert metrics["prefix_cache_hits_total"] > 0 and metrics["recomputed_tokens_total"] > 0
    assert metrics['requests_total{outcome="finished"}'] == len(answers)
    assert metrics["usage_disputed_total"] == 0
    assert metrics["router_overlap_error_tokens_sum"] == 0
    assert not any(value for name, value in metrics.items() if name.startswith("actor_restarts_total"))
    num_deaths = sum(its["engine_deaths"] for its in records.values())
    num_moved = sum(its["recomputed_tokens"] > 0 for its in records.values())
    assert num_deaths < num_moved == metrics['requests_resumed_total{same_numerics="true"}']
    live = json.loads(ledger(folder, "reconcile", "--metrics-url", f"{server.url}/metrics", "--json").stdout)
    assert [account["agrees"] for account in live] == [True]
