"""Measure where the time of one warm request goes, from its first byte to its first token, part by part.

    python -m bench.request_budget [--json] [--quick] [--rounds 20] [--prompt-tokens 1024] [--turns 8] [--model FOLDER]

A chat of several turns, about 1,024 tokens in all, was just served; it is sent again with a new turn of a few words,
and the response is streamed. A whole server (dummy weights in the shape of Qwen3-0.6B) serves it over HTTP; its
functions are timed in place (`timed_server.py`) and put on one timeline with what the client saw. A part is the time
spent in its functions between sending and first token; `elsewhere` is the rest: reading HTTP, hops between actors and
between the two processes, and waiting for the processor. Medians of the rounds, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from bench.http_load import Answer, ask_all
from bench.peers.checkpoint import make_checkpoint
from bench.peers.servers import HOME
from bench.spans import Span, own_seconds, read_spans
from bench.timed_server import MODEL, TimedServer
from quipu.actors.shared.checkpoint import DEMO

PARTS = {
    "parse": "parsing and validating the body",
    "tokenise": "the chat template, and the ids of the new text",
    "hash": "block keys of the prompt",
    "schedule": "planning the next step",
    "match": "finding and taking cached blocks",
    "step": "the pass that samples the first token",
    "books": "the executor's own bookkeeping around it",
    "detokenise": "its text",
    "write": "encoding its event and writing it to the socket",
    "elsewhere": "HTTP, hops between actors and processes, waiting for the processor",
}
WORDS = [f"{what}{number}" for what in ("knot", "cord", "day") for number in range(10)]
TOKENS_A_WORD = 2.5
CHAT = "/v1/chat/completions"
MAX_TOKENS = 4


def make_chat(num_turns: int, words_a_turn: int, draw: random.Random) -> list[dict[str, str]]:
    """Return turns of random words, the last from the user."""
    return [
        {"role": "user" if turn % 2 == 0 else "assistant", "content": " ".join(draw.choices(WORDS, k=words_a_turn))}
        for turn in range(num_turns // 2 * 2 + 1)
    ]


def body_of(messages: Sequence[dict[str, str]]) -> dict[str, Any]:
    fields = {"model": MODEL, "messages": list(messages), "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    return fields | {"ignore_eos": True}


def budget_of(answer: Answer, spans: Sequence[Span]) -> dict[str, float]:
    """Return the milliseconds of each part between sending and first token. Raises ValueError if no step ran."""
    begin_s, end_s = answer.sent_s, answer.tokens_s[0]
    seconds = dict.fromkeys(PARTS, 0.0)
    # the client may receive its token before the function that wrote it has returned
    inside = [attrs.evolve(span, end_s=min(span.end_s, end_s)) for span in spans if begin_s <= span.start_s < end_s]
    steps = [span for span in inside if span.name == "step"]
    if not steps:
        raise ValueError("no step ran between a request and its first token")
    first = steps[0]
    for span, own_s in zip(inside, own_seconds(inside), strict=True):
        # the next step is planned while this one runs: it does not delay the request
        if span.thread == first.thread or not first.start_s <= span.start_s <= first.end_s:
            seconds[span.name] += own_s
    seconds["elsewhere"] = end_s - begin_s - sum(seconds.values())
    return {name: value * 1000 for name, value in seconds.items()} | {"first_token": (end_s - begin_s) * 1000}


def measure(model: Path, flags: Sequence[str], *, rounds: int, num_tokens: int, num_turns: int) -> dict[str, Any]:
    """Send a chat and its next turn in every round, each round with a new chat."""
    draw = random.Random(0)
    words_a_turn = max(1, round(num_tokens / (num_turns + 1) / TOKENS_A_WORD))
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        with TimedServer(model, Path(folder), *flags) as server:
            for _ in range(rounds + 1):  # the first is the warm-up
                chat = make_chat(num_turns, words_a_turn, draw)
                ask_all(server.port, [body_of(chat)], CHAT)
                chat += [{"role": "assistant", "content": "Many."}, {"role": "user", "content": "How many?"}]
                answers += ask_all(server.port, [body_of(chat)], CHAT)
        spans = read_spans(Path(folder))
    budgets = [budget_of(answer, spans) for answer in answers[1:]]
    return describe(budgets)


def describe(budgets: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return a row for each part, and the total last."""
    whole = statistics.median(budget["first_token"] for budget in budgets)
    rows = []
    for name in [*PARTS, "first_token"]:
        value = statistics.median(budget[name] for budget in budgets)
        rows.append({"name": name, "value": value, "unit": "ms", "share": value / whole, "what": PARTS.get(name, "")})
    return {"rows": rows}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise servers would outlive this process
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m bench.request_budget", description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="smoke test: the demo model, one round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="approximate length of the chat")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--model", type=Path, help="a checkpoint (default: that of bench.peers, created if missing)")
    arguments, flags = parser.parse_known_args()
    if arguments.quick:
        arguments.rounds, arguments.prompt_tokens, arguments.model = 1, 256, arguments.model or DEMO
    model = arguments.model or make_checkpoint(HOME / "qwen3-0.6b-random")
    report = measure(
        model, flags, rounds=arguments.rounds, num_tokens=arguments.prompt_tokens, num_turns=arguments.turns
    )
    if arguments.json:
        print(json.dumps(report))
        return
    for row in report["rows"]:
        print(f"{row['name']:12} {row['value']:9.3f} ms {row['share']:7.1%}  {row['what']}")


if __name__ == "__main__":
    main()
