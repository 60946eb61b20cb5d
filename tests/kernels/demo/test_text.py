"""The generated text of the demo model: every chat is right, and the checkers refuse what is not."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from bench.demo_judges import fits, is_consistent, is_right
from bench.demo_rows import spoilt
from quipu.kernels.demo.text import words
from quipu.kernels.demo.text.arithmetic import draw_task
from quipu.kernels.demo.text.chat_mixture import SHORT_KINDS, draw_document_chat, draw_short_chat
from quipu.kernels.demo.text.facts import RELATIONS
from quipu.kernels.demo.text.json_answers import draw_json_task
from quipu.kernels.demo.text.recall import make_document, recall_chat, unknown_question
from quipu.kernels.demo.text.scenery import LEAD_INS, filler
from quipu.kernels.demo.text.stories import PLOTS, make_story
from quipu.kernels.demo.text.tool_chats import draw_tool_task

SEEDS = range(300)


def test_stories_are_consistent() -> None:
    """Every story passes its own checker, has five to eight sentences, and all plots occur."""
    stories = [make_story(Random(seed)) for seed in SEEDS]
    assert {story.plot for story in stories} == set(PLOTS)
    for story in stories:
        assert is_consistent(story.text), story.text
        assert 5 <= len(re.findall(r"[.!?]\"?(?: |$)", story.text)) - story.text.count('!" said') <= 8, story.text


def test_checker_refuses_faults() -> None:
    """The checker refuses at least 95 of 100 stories with one swapped name or one non-word."""
    refused = [not is_consistent(spoilt(random, make_story(random))) for random in map(Random, SEEDS)]
    assert sum(refused) >= 0.95 * len(refused)
    good = make_story(Random(1)).text
    assert not is_consistent("") and not is_consistent(good + " " + good) and not is_consistent(good.rsplit(". ", 1)[0])


def test_documents_state_their_facts() -> None:
    """A document states each fact once, in order, and no other person is named in it."""
    for seed in SEEDS:
        document = make_document(Random(seed), 1 + seed % 40, seed % 70)
        position = 0
        for fact in document.facts:
            position = document.text.index(fact.statement, position)
        assert len({(fact.person, fact.relation.name) for fact in document.facts}) == len(document.facts)
        named = set(re.findall(r"\w+", document.text)) & set(words.NAMES)
        assert named == {fact.person for fact in document.facts}


def test_values_cannot_be_guessed() -> None:
    """Each relation has at least sixteen values, none of which is a part of another relation's question."""
    random = Random(0)
    for relation in RELATIONS:
        assert len({relation.values(random) for _ in range(2000)}) >= 16, relation.name
    scenery = {filler(random) for _ in range(5000)} | set(LEAD_INS)
    assert not any(re.search(rf"\b{name}\b", text) for text in scenery for name in words.NAMES)


def test_right_answers() -> None:
    """An answer is right if it states the fact, and wrong with another value or person."""
    for seed in SEEDS:
        document = make_document(Random(seed), 20, 0)
        for fact, other in zip(document.facts, document.facts[1:], strict=False):
            assert is_right(fact, f" {fact.statement}\n")
            assert not is_right(fact, other.statement) and not is_right(fact, "") and not is_right(fact, fact.value[:2])
        question = unknown_question(Random(seed), document)
        assert question not in {q.format(n=f.person) for f in document.facts for q in f.relation.questions}


@pytest.mark.parametrize("thinks", [False, True])
def test_answers_about_documents(thinks: bool) -> None:
    """Each question of a chat about a document is followed by a sentence of the document, or by not knowing."""
    seen = 0
    for seed in range(400):
        chat = recall_chat(Random(seed), 12, 10, 6)
        if chat.thinking != thinks:
            continue
        document = chat.messages[0]["content"]
        for message in chat.messages:
            if message["role"] == "assistant" and message["content"].startswith(words.NAMES):
                value = message["content"].rstrip(".").split()[-1]
                assert value in document
                assert (message["content"] in message.get("reasoning_content", "")) == thinks
                seen += 1
    assert seen > 100


def test_arithmetic() -> None:
    """Results are right, and so is each equation of the steps."""
    for seed in SEEDS:
        for large in (False, True):
            task, result, steps = draw_task(Random(seed), large=large)
            assert eval(task.replace("x", "*")) == result
            for left, right in re.findall(r"([\d+ -]+) = (\d+)", steps):
                assert eval(left) == int(right), steps
            assert str(result) in steps


def test_tool_tasks() -> None:
    """The call of a task fits its schema, whose name occurs once among four."""
    for seed in SEEDS:
        task = draw_tool_task(Random(seed))
        functions = [schema["function"] for schema in task.schemas]
        (function,) = [function for function in functions if function["name"] == task.name]
        assert len(functions) == 4
        assert list(task.arguments) == function["parameters"]["required"] == list(function["parameters"]["properties"])
        for name, value in task.arguments.items():
            assert isinstance(
                value, {"string": str, "integer": int}[function["parameters"]["properties"][name]["type"]]
            )
            assert str(value) in task.request
        assert str(*json.loads(task.result).values()) in task.answer


def test_json_tasks() -> None:
    """The right object fits its schema; one with a field missing, added or of another type does not, nor does text."""
    for seed in SEEDS:
        task = draw_json_task(Random(seed))
        name, value = next(iter(task.value.items()))
        assert fits(task.schema, json.dumps(task.value))
        for wrong in (
            {key: task.value[key] for key in task.value if key != name},
            task.value | {"other": 1},
            task.value | {name: None},
            task.value | {name: 1 if isinstance(value, (str, list, bool)) else "1"},
        ):
            assert not fits(task.schema, json.dumps(wrong))
        assert not fits(task.schema, json.dumps(task.value) + "}") and not fits(task.schema, "[]")


def test_mixture_draws_every_kind() -> None:
    """All kinds of short chats occur, roles alternate, and a seed always draws the same chat."""
    kinds = set()
    for seed in SEEDS:
        for chat, again in (
            (draw_short_chat(Random(seed)), draw_short_chat(Random(seed))),
            (draw_document_chat(Random(seed), 8), draw_document_chat(Random(seed), 8)),
        ):
            kinds.add(chat.kind)
            assert chat == again
            roles = [message["role"] for message in chat.messages]
            turns = roles[roles[0] == "system" :]
            assert turns[0] == "user" and turns[-1] == "assistant" and len(turns) % 2 == 0
            assert all(role == "assistant" for role in turns[1::2])
            assert all(role in ("user", "tool") for role in turns[::2])
    assert len(kinds) == len(SHORT_KINDS)  # chats about people without a text are of the kind "recall" as well
