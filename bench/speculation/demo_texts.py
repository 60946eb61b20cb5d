"""How many tokens a pass yields on texts of the demo model: words said again, calls of tools, JSON of one schema.

Passes are counted, not timed, and what they cost is given: the numbers are the same on a busy machine.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

import attrs

from bench.demo_client import Client, served
from quipu.kernels.demo.text.chat_mixture import HELD_OUT
from quipu.kernels.demo.text.chats import user
from quipu.kernels.demo.text.json_answers import JsonTask, draw_json_task, json_messages
from quipu.kernels.demo.text.repetition import WORDS
from quipu.kernels.demo.text.tool_chats import draw_tool_task
from quipu.kernels.demo.text.toolbox import offer_tools

COSTS = "1:20,8:21,32:45"
"""Of passes in the shape of Qwen3-0.6B, as the CPU of docs/operate/speculative-decoding.md measures them."""
NUM_WORDS = 16
NUM_ITEMS = 8
Body = dict[str, Any]


@attrs.frozen
class Found:
    """What the drafts of some requests were worth."""

    num_requests: int
    num_tokens: int
    num_drafts: int
    num_drafted: int
    num_accepted: int
    accepted_at: tuple[int, ...]
    """How often the first token of a draft was accepted, the second, and so on."""

    @property
    def tokens_a_pass(self) -> float:
        return self.num_tokens / max(1, self.num_tokens - self.num_accepted)

    def to_row(self) -> dict[str, Any]:
        return attrs.asdict(self) | {"tokens_a_pass": self.tokens_a_pass}

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Found:
        return cls(**{field.name: row[field.name] for field in attrs.fields(cls)})

    def rates(self) -> list[float]:
        """Return how likely a step has a draft, then how likely each of its tokens is right, if those before it are.

        A prompt's own step draws the first token of an answer and has none.
        """
        num_steps = self.num_tokens - self.num_accepted - self.num_requests
        counts = (num_steps, self.num_drafts, *self.accepted_at)
        return [at / max(1, earlier) for earlier, at in pairwise(counts)]


def copy_editing(random: Random) -> Iterator[Body]:
    """Ask for words again, three times in a chat, one of them changed each time."""
    said = random.sample(WORDS, NUM_WORDS)
    messages: list[Body] = []
    for _ in range(3):
        said[random.randrange(NUM_WORDS)] = random.choice(WORDS)
        messages = [*messages, user(f"Repeat these words: {' '.join(said)}")]
        yield {"messages": messages}
        messages.append({"role": "assistant", "content": " ".join(said)})


def predicted_edits(random: Random) -> Iterator[Body]:
    """Ask for words again, and predict them with one of them changed."""
    for body in copy_editing(random):
        words = str(body["messages"][-1]["content"]).removeprefix("Repeat these words: ").split(" ")
        words[random.randrange(NUM_WORDS)] = random.choice(WORDS)
        yield body | {"prediction": {"type": "content", "content": " ".join(words)}}


def agent_transcripts(random: Random) -> Iterator[Body]:
    """Ask for what tools do, again and again in one chat, with their calls and results."""
    offered = offer_tools(random)
    messages: list[Body] = []
    for _ in range(NUM_ITEMS):
        task = draw_tool_task(random, offered)
        messages = [*messages, user(task.request)]
        yield {"messages": messages, "tools": task.schemas}
        call = {"name": task.name, "arguments": json.dumps(task.arguments)}
        messages.append(
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": call}]}
        )
        messages.append({"role": "tool", "tool_call_id": "c", "content": task.result})
        yield {"messages": messages, "tools": task.schemas}
        messages.append({"role": "assistant", "content": task.answer})


def json_tasks(random: Random) -> Iterator[JsonTask]:
    """Draw objects with a field in common."""
    schema = draw_json_task(random).schema
    num_found = 0
    while num_found < NUM_ITEMS:
        task = draw_json_task(random)
        if task.schema["properties"].keys() >= {*list(schema["properties"])[:1]}:
            num_found += 1
            yield task


def json_sets(random: Random) -> Iterator[Body]:
    """Ask for objects, and trust the model to write JSON."""
    for task in json_tasks(random):
        yield {"messages": json_messages(random, task)}


SHORT = {"type": "string", "maxLength": 20}
BOUNDED = {
    "string": SHORT,
    "integer": {"type": "integer", "minimum": 0, "maximum": 99},
    "array": {"type": "array", "items": SHORT, "maxItems": 3},
    "boolean": {"type": "boolean"},
}
"""Types of fields, so that no text goes on without end: it would repeat itself, and drafts of it would be right."""


def json_schemas(random: Random) -> Iterator[Body]:
    """Ask for the same, under schemas, which force the names of fields and what stands between values."""
    for task in json_tasks(random):
        fields = {name: BOUNDED[field["type"]] for name, field in task.schema["properties"].items()}
        schema = task.schema | {"properties": fields, "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "task", "schema": schema}}
        yield {"messages": json_messages(random, task), "response_format": form}


TEXTS: dict[str, Callable[[Random], Iterator[Body]]] = {
    "copy_editing": copy_editing,
    "predicted_edits": predicted_edits,
    "agent_transcripts": agent_transcripts,
    "json_sets": json_sets,
    "json_schemas": json_schemas,
}


def measure_texts(names: Iterable[str], num_cases: int) -> dict[str, Found]:
    """Serve the demo model with `suffix`, and return what its drafts are worth, by kind of text."""
    with served("demo", "--executor", "cpu", "--speculative", "suffix", "--speculative-costs", COSTS) as base_url:
        return {name: measure_text(base_url, name, range(num_cases)) for name in names}


def measure_text(base_url: str, name: str, cases: Iterable[int], prefix: str = "quipu") -> Found:
    """Ask a server for texts of one kind, and return what its drafts were worth. `prefix`: of its metrics."""
    client = Client(base_url)
    before = _counters(base_url, prefix)
    num_requests = 0
    for case in cases:
        for body in TEXTS[name](Random(f"{HELD_OUT} {name} {case}")):
            client.chat(**body)
            num_requests += 1
    return _difference(before, _counters(base_url, prefix), prefix, num_requests)


def _counters(base_url: str, prefix: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{base_url}/metrics") as response:
        lines = [line for line in response.read().decode().splitlines() if line.startswith(f"{prefix}:")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def _difference(before: dict[str, float], after: dict[str, float], prefix: str, num_requests: int) -> Found:
    def risen(name: str, label: str = "") -> int:
        return sum(
            int(value - before.get(series, 0))
            for series, value in after.items()
            if series.startswith(f"{prefix}:{name}_total{{") and label in series
        )

    accepted_at: list[int] = []
    while at := risen("spec_decode_num_accepted_tokens_per_pos", f'position="{len(accepted_at)}"'):
        accepted_at.append(at)
    return Found(
        num_requests=num_requests,
        num_tokens=risen("generation_tokens"),
        num_drafts=risen("spec_decode_num_drafts"),
        num_drafted=risen("spec_decode_num_draft_tokens"),
        num_accepted=risen("spec_decode_num_accepted_tokens"),
        accepted_at=tuple(accepted_at),
    )
