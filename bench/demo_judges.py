"""Judges of what the demo model writes: is a recalled fact right, does JSON fit its schema, is a story consistent?

Used by the benchmark of the demo model and by tests.
"""

from __future__ import annotations

import json
import re
from typing import Any

from quipu.kernels.demo.text import words
from quipu.kernels.demo.text.facts import Fact
from quipu.kernels.demo.text.stories import PLOTS, SLOTS, Step


def is_right(fact: Fact, answer: str) -> bool:
    """Whether `answer` states the fact, and nothing else."""
    return answer.strip() == fact.statement


def fits(schema: dict[str, Any], text: str) -> bool:
    """Whether `text` is JSON for a schema of the kind that `draw_json_task` draws: nothing missing, nothing else."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    properties = schema["properties"]
    return (
        isinstance(value, dict)
        and value.keys() == properties.keys()
        and all(_has_type(value[name], properties[name]) for name in properties)
    )


def _has_type(value: Any, schema: dict[str, Any]) -> bool:
    if schema["type"] == "array":
        return isinstance(value, list) and all(_has_type(item, schema["items"]) for item in value)
    if schema["type"] == "integer":
        return type(value) is int
    return isinstance(value, {"string": str, "boolean": bool}[schema["type"]])


def is_consistent(text: str) -> bool:
    """Whether `text` is a story whose words all exist and whose slots are filled alike throughout."""
    return any(_reads_as(steps, text.strip(), {}) for steps in PLOTS.values())


def _reads_as(steps: tuple[Step, ...], text: str, slots: dict[str, str]) -> bool:
    """Whether `text` is what is left of a plot's story, given the slots that are known already."""
    if not steps:
        return not text
    for sentence in dict.fromkeys(steps[0]):
        if not sentence:
            if _reads_as(steps[1:], text, slots):
                return True
            continue
        match = re.match(_pattern(sentence, slots) + "(?: |$)", text)
        if match:
            found = slots | match.groupdict()
            distinct = found.get("hero") != found.get("helper") or "hero" not in found
            if distinct and _reads_as(steps[1:], text[match.end() :], found):
                return True
    return False


def _pattern(sentence: str, slots: dict[str, str]) -> str:
    """Return the regular expression of a sentence: a known slot is its word, an unknown one any of its choices."""
    parts: list[str] = []
    seen: set[str] = set()
    for literal, name in re.findall(r"([^{]*)(?:\{(\w+)\})?", sentence):
        parts.append(re.escape(literal))
        if not name:
            continue
        if name.lower() in ("he", "his"):
            known = slots.get("hero")
            choices = [words.pronouns(known)[name.lower() == "his"]] if known else ["she", "he", "her", "his"]
            parts.append("(?:" + "|".join(word.capitalize() if name[0] == "H" else word for word in choices) + ")")
            continue
        has_article = name.startswith(("an_", "a_"))
        slot = name.removeprefix("an_").removeprefix("a_")
        if slot in seen:
            parts.append(f"(?P={slot})")
        elif slot in slots:
            word = slots[slot]
            parts.append(re.escape(words.article(word) if has_article else word))
        else:
            seen.add(slot)
            choices = sorted(SLOTS[slot], key=len, reverse=True)
            parts.append(("(?:an?) " if has_article else "") + f"(?P<{slot}>{'|'.join(map(re.escape, choices))})")
    return "".join(parts)
