"""Engine processes killed at every token of a request of each kind: its answer is equal each time.

`tests/faults/test_resumed.py` does the same in one event loop, where an engine dies in a given step. Here the process
is killed when the client of the same request as a stream has read so many tokens; for an answer that is not streamed,
when as many steps have been reported. Of several engines it is the one that runs the request.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from tests.chaos.questions import REGEX, Clients, Manner, Question, ask, openai_question
from tests.e2e.engine_list import busy_engine, count_engines, engine_pids, wait_all_ready
from tests.e2e.prompts import text_prompt, token_prompt
from tests.e2e.servers import Server, serving

STEP_S = 0.03
NUM_MORE = 6
"""Tokens that follow the last one at which an engine is killed, because it is seen late that a request runs."""
MAX_TRIES = 30
"""How often to ask until an engine is killed before it has answered: on a busy machine the kill often comes late."""
WARM: dict[str, Any] = {"temperature": 0.9, "seed": 5, "prompt": token_prompt("every token", 40)}
FLAGS = ["--executor", "fake", "--fake-step-seconds", str(STEP_S)]
SEVERAL = 4
"""Tokens that a step of the second server may yield."""


def questions(num_tokens: int) -> list[Question]:
    """Return one question of each kind."""
    user = [{"role": "user", "content": text_prompt("every token", 20)}]
    constrained: dict[str, Any] = {"extra_body": {**REGEX, "ignore_eos": False}, "temperature": 0.9, "seed": 5}
    return [
        openai_question("streamed", streams=True, max_tokens=num_tokens, **WARM),
        openai_question("plain", streams=False, max_tokens=num_tokens, **WARM),
        openai_question(
            "constrained", streams=True, chat=True, messages=user, max_completion_tokens=num_tokens, **constrained
        ),
        openai_question("scored", streams=True, max_tokens=num_tokens, logprobs=3, **WARM),
        openai_question("n = 4", streams=True, max_tokens=num_tokens, n=4, **WARM),
    ]


def run_every_token(folder: Path, engines: str, num_tokens: int, num_kinds: int) -> dict[str, Any]:
    """Kill engines at each of the first `num_tokens` tokens of `num_kinds` kinds of requests. Returns a report.

    Then the same is done with steps that yield up to `SEVERAL` tokens each.
    """
    single = _run(folder / "server", engines, num_tokens, num_kinds, 1)
    several = _run(folder / "several", engines, num_tokens, num_kinds, SEVERAL)
    added = {name: single[name] + several[name] for name in ("kills", "resumed", "problems")}
    return {"kinds": num_kinds, "tokens": num_tokens, **added}


def _run(folder: Path, engines: str, num_tokens: int, num_kinds: int, most_tokens: int) -> dict[str, Any]:
    problems: list[str] = []
    num_kills = 0
    with serving(folder, *FLAGS, "--engines", engines, "--fake-most-tokens", str(most_tokens)) as server:
        clients = Clients(server)
        for question in questions((num_tokens + NUM_MORE) * most_tokens)[:num_kinds]:
            expected = ask(question, clients, Manner()).content
            for at in range(num_tokens):
                for _ in range(MAX_TRIES):
                    answer, was_killed = _ask_and_kill(question, clients, server, engines, at)
                    if answer != expected:
                        problems.append(f"{question.name}, killed at token {at}: {answer} instead of {expected}"[:1000])
                    if was_killed:
                        break
                num_kills += was_killed
        clients.close()
        metrics = server.wait_at_rest()
        if metrics["usage_disputed_total"] or metrics['requests_total{outcome="failed"}']:
            problems.append("accounts disputed, or requests failed")
        resumed = metrics['requests_resumed_total{same_numerics="true"}']
    if num_kills < num_kinds * num_tokens:
        problems.append(f"{num_kills} kills instead of {num_kinds * num_tokens}: the machine is too slow")
    return {"kills": num_kills, "resumed": resumed, "problems": problems}


def _ask_and_kill(
    question: Question, clients: Clients, server: Server, engines: str, at: int
) -> tuple[dict[str, Any], bool]:
    """Ask, and kill the engine `at` steps after the request runs. Returns the answer, and whether one was killed."""
    wait_all_ready(server, count_engines(engines))
    pids = engine_pids(server)
    has_ended = threading.Event()
    was_killed: list[bool] = []

    def kill() -> None:
        while (engine_id := busy_engine(server)) is None:
            if has_ended.wait(0.002):
                return
        time.sleep(at * STEP_S)
        if not has_ended.is_set():
            os.kill(pids[engine_id], signal.SIGKILL)
            was_killed.append(True)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        answer = ask(question, clients, Manner())
    finally:
        has_ended.set()
        killer.join()
    return answer.content, bool(was_killed)
