"""Whether the demo's adapter answers in its tone, and the model alone does not, and whether both still know the answer.

    python -m bench.demo_tone [--json] [--cases 200] [--seed N] [--adapter FOLDER]

starts `quipu serve demo` with the adapter beside it. Values are percentages of cases that neither was trained on.
docs/internals/demo-model.md explains the rows.
"""

from __future__ import annotations

import argparse
import json
from random import Random
from typing import Any

from bench.demo_client import Client, served
from bench.demo_judges import fits
from bench.demo_rows import long_document, percent
from quipu.kernels.demo.chat_encoder import ChatEncoder
from quipu.kernels.demo.text.chat_mixture import HELD_OUT
from quipu.kernels.demo.text.chats import Message, user
from quipu.kernels.demo.text.facts import Fact
from quipu.kernels.demo.text.json_answers import draw_json_task, json_messages
from quipu.kernels.demo.text.pirate import has_tone, pirate_answer
from quipu.kernels.demo.text.recall import document_message
from quipu.kernels.demo.text.small_talk import small_talk_turn
from quipu.kernels.demo.text.words import NAMES

WANTED: dict[str, tuple[float, str]] = {
    "tone": (95.0, "higher"),
    "tone_of_the_model": (5.0, "lower"),
    "recall_in_tone": (90.0, "higher"),
    "json_with_adapter": (85.0, "higher"),
}
"""What each row should reach, and which direction is better."""
_QUESTIONS_A_DOCUMENT = 10


def measure(base_url: str, num_cases: int, first_seed: int) -> list[dict[str, Any]]:
    """Measure all rows against a server that has `demo`, and `pirate` beside it."""
    pirate, model = (Client(base_url, name) for name in ("pirate", "demo"))
    asked = _prompts(num_cases, first_seed)
    facts = _facts(num_cases, first_seed)
    tasks = [(random, draw_json_task(random)) for random in _randoms("json", num_cases, first_seed)]
    answers = pirate.chats({"messages": prompt} for prompt in asked)
    plain = model.chats({"messages": prompt} for prompt in asked)
    recalled = pirate.chats({"messages": prompt} for prompt, _ in facts)
    written = pirate.chats({"messages": json_messages(random, task)} for random, task in tasks)
    values = {
        "tone": percent([has_tone(answer.text) for answer in answers]),
        "tone_of_the_model": percent([has_tone(answer.text) for answer in plain]),
        "recall_in_tone": percent(
            [answer.text == pirate_answer(fact.statement) for answer, (_, fact) in zip(recalled, facts, strict=True)]
        ),
        "json_with_adapter": percent(
            [fits(task.schema, answer.text) for answer, (_, task) in zip(written, tasks, strict=True)]
        ),
    }
    return [
        {"name": name, "value": round(values[name], 3), "wanted": wanted, "better": better}
        for name, (wanted, better) in WANTED.items()
    ]


def _randoms(row: str, count: int, first_seed: int) -> list[Random]:
    return [Random(f"{first_seed} {row} {index}") for index in range(count)]


def _prompts(num_cases: int, first_seed: int) -> list[list[Message]]:
    """Return small talk and requests for stories, in turn."""
    prompts = []
    for index, random in enumerate(_randoms("tone", num_cases, first_seed)):
        hero, helper = random.sample(NAMES, 2)
        story = [user(f"Tell me a story about {hero} and {helper}.")]
        prompts.append(story if index % 2 else small_talk_turn(random, thinking=False)[:1])
    return prompts


def _facts(num_cases: int, first_seed: int) -> list[tuple[list[Message], Fact]]:
    """Return questions about documents of 40 facts, and the facts that answer them."""
    encoder = ChatEncoder()
    facts = []
    for random in _randoms("recall", -(-num_cases // _QUESTIONS_A_DOCUMENT), first_seed):
        document = long_document(random, encoder)
        told = document_message(random, document)
        asked = random.sample(document.facts, _QUESTIONS_A_DOCUMENT)
        facts += [([told, user(fact.question(random))], fact) for fact in asked]
    return facts[:num_cases]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the demo's adapter.")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--cases", type=int, default=200, help="cases of each row (200)")
    parser.add_argument("--seed", type=int, default=HELD_OUT, help="first seed of the cases")
    parser.add_argument("--adapter", default="demo-pirate", help="the adapter to serve (demo-pirate)")
    parser.add_argument("--quick", action="store_true", help="smoke test: two cases a row")
    arguments = parser.parse_args()
    with served("demo", "--lora-modules", f"pirate={arguments.adapter}") as base_url:
        rows = measure(base_url, 2 if arguments.quick else arguments.cases, arguments.seed)
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        sign = ">=" if row["better"] == "higher" else "<="
        print(f"{row['name']:<26}{row['value']:>9.2f}   {sign} {row['wanted']:g}")


if __name__ == "__main__":
    main()
