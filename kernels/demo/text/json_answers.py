"""Answers as JSON for a small schema, whose values stand in a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from . import words
from .chats import Chat, assistant, system, user


@dataclass(frozen=True)
class Field:
    """A field of a schema: its possible names, its type, its value, and sentences that state it."""

    names: tuple[str, ...]
    type: str
    draw: Callable[[Random], Any]
    sentences: tuple[str, ...]


def _of(values: tuple[Any, ...]) -> Callable[[Random], Any]:
    return lambda random: random.choice(values)


FIELDS = (
    Field(("name", "person", "who"), "string", _of(words.NAMES), ("The person is called {}.", "My friend is called {}.")),
    Field(("age", "years"), "integer", lambda random: random.randint(2, 99), ("The age is {}.", "The person is {} years old.")),
    Field(("city", "town", "home"), "string", _of(words.TOWNS), ("The town is {}.", "The house is in {}.")),
    Field(("job", "trade", "work"), "string", _of(words.TRADES), ("The job is {}.", "The work is that of a {}.")),
    Field(("colour", "color"), "string", _of(words.COLOURS), ("The colour is {}.", "Everything is painted {}.")),
    Field(("pet", "animal"), "string", _of(words.ANIMALS), ("The pet is a {}.", "The animal in the house: {}.")),
    Field(("fruit", "dessert"), "string", _of(words.FRUITS), ("The fruit is {}.", "For dessert: {}.")),
    Field(("instrument", "music"), "string", _of(words.INSTRUMENTS), ("The instrument is the {}.", "The music comes from the {}.")),
    Field(("count", "number", "total"), "integer", lambda random: random.randint(2, 99), ("The number is {}.", "There are {} in all.")),
    Field(("price", "cost"), "integer", lambda random: random.randint(2, 99), ("The price is {}.", "It costs {} coins.")),
    Field(("day", "weekday"), "string", _of(words.DAYS), ("The day is {}.", "It happens on {}.")),
    Field(("open", "is_open"), "boolean", _of((True, False)), ("Open: {}.", "Is it open? {}.")),
    Field(("dishes", "menu"), "array", lambda random: random.sample(words.DISHES, random.randint(1, 3)), ("The dishes: {}.", "On the menu: {}.")),
)  # fmt: skip
INSTRUCTIONS = (
    "Answer with JSON for this schema: {}", "Return JSON that fits this schema: {}", "Write JSON by this schema: {}",
)  # fmt: skip


@dataclass(frozen=True)
class JsonTask:
    schema: dict[str, Any]
    text: str
    value: dict[str, Any]


def draw_json_task(random: Random) -> JsonTask:
    """Draw a schema of one to four fields, all required, and a text that gives their values in any order."""
    fields = random.sample(FIELDS, random.randint(1, 4))
    names = [random.choice(field.names) for field in fields]
    values = {name: field.draw(random) for name, field in zip(names, fields, strict=True)}
    sentences = [
        random.choice(field.sentences).format(_spoken(values[name]))
        for name, field in zip(names, fields, strict=True)
    ]  # fmt: skip
    random.shuffle(sentences)
    properties = {
        name: {"type": "array", "items": {"type": "string"}} if field.type == "array" else {"type": field.type}
        for name, field in zip(names, fields, strict=True)
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": names}
    if random.random() < 0.3:
        schema["additionalProperties"] = False
    return JsonTask(schema, " ".join(sentences), values)


def json_messages(random: Random, task: JsonTask) -> list[dict[str, Any]]:
    """Return the messages that ask for `task`: the schema in the system message or before the text."""
    instruction = random.choice(INSTRUCTIONS).format(json.dumps(task.schema))
    if random.random() < 0.5:
        return [system(instruction), user(task.text)]
    return [user(f"{instruction}\n\n{task.text}")]


def json_chat(random: Random) -> Chat:
    task = draw_json_task(random)
    thinking = random.random() < 0.1
    reasoning = f"The schema has {', '.join(task.value)}." if thinking else None
    answer = assistant(json.dumps(task.value), reasoning)
    return Chat("json", [*json_messages(random, task), answer], thinking=thinking)


def _spoken(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value)
    return str(value)
