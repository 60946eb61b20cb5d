"""What is asked of the demo model by `bench.demo_model`, and what a right answer is. Cases come from held-out seeds."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from bench.demo_client import Body, Client
from bench.demo_judges import fits, is_consistent, is_right
from quipu.kernels.demo.chat_encoder import ChatEncoder
from quipu.kernels.demo.text import words
from quipu.kernels.demo.text.arithmetic import QUESTIONS, draw_task
from quipu.kernels.demo.text.chat_mixture import HELD_OUT, draw_document_chat, draw_short_chat
from quipu.kernels.demo.text.chats import Chat, Message, assistant, user
from quipu.kernels.demo.text.facts import Fact
from quipu.kernels.demo.text.json_answers import draw_json_task, json_messages
from quipu.kernels.demo.text.recall import Document, document_message, make_document
from quipu.kernels.demo.text.stories import Story, make_story
from quipu.kernels.demo.text.tool_chats import draw_tool_task

NUM_FACTS = 40
DOCUMENT_TOKENS = (1400, 1600)
TENTHS = 10
QUESTIONS_PER_CHAT = 5

Rows = dict[str, float]


@dataclass
class Cases:
    """What the rows are measured with: the server, a tokenizer for rendered prompts, and how many cases there are."""

    client: Client
    encoder: ChatEncoder
    num_cases: int
    first_seed: int = HELD_OUT

    def random(self, row: str, index: int) -> Random:
        """Return the random numbers of one case."""
        return Random(f"{self.first_seed} {row} {index}")

    def prompt(self, chat: Chat) -> str:
        """Return the prompt, rendered here, for the next assistant message of `chat`."""
        return self.encoder.render(chat, add_generation_prompt=True)


def percent(right: list[bool]) -> float:
    """Return the share of right answers in percent."""
    return 100 * sum(right) / len(right)


def long_document(random: Random, encoder: ChatEncoder) -> Document:
    """Return a document of 40 facts and 1,400 to 1,600 tokens."""
    for attempt in count():
        document = make_document(random, NUM_FACTS, 75 + attempt % 30)
        num_tokens = len(encoder.tokenizer.encode(document.text, add_special_tokens=False).ids)
        if DOCUMENT_TOKENS[0] <= num_tokens <= DOCUMENT_TOKENS[1]:
            return document
    raise AssertionError("unreachable")


def recall(cases: Cases) -> Rows:
    """Ask for one fact in each tenth of each document, with the document and without it."""
    with_document: list[Body] = []
    without: list[Body] = []
    asked: list[tuple[int, Fact]] = []
    for index in range(-(-cases.num_cases // TENTHS)):
        random = cases.random("recall", index)
        document = long_document(random, cases.encoder)
        system = document_message(random, document)
        for tenth in range(TENTHS):
            position = tenth * NUM_FACTS // TENTHS + random.randrange(NUM_FACTS // TENTHS)
            fact = document.facts[position]
            question = user(fact.question(random))
            with_document.append({"messages": [system, question]})
            without.append({"messages": [question]})
            asked.append((tenth, fact))
    right = [
        is_right(fact, answer.text) for (_, fact), answer in zip(asked, cases.client.chats(with_document), strict=True)
    ]
    guessed = [
        is_right(fact, answer.text) for (_, fact), answer in zip(asked, cases.client.chats(without), strict=True)
    ]
    by_tenth: dict[int, list[bool]] = defaultdict(list)
    for (tenth, _), is_it in zip(asked, right, strict=True):
        by_tenth[tenth].append(is_it)
    return {
        "recall": percent(right),
        "recall_worst_tenth": min(map(percent, by_tenth.values())),
        "recall_without_document": percent(guessed),
    }


def recall_cached_same(cases: Cases) -> Rows:
    """Ask five questions in one chat, the rest of it cached; then send the same prompts with nothing cached."""
    same: list[bool] = []
    for index in range(-(-cases.num_cases // QUESTIONS_PER_CHAT)):
        random = cases.random("cached", index)
        document = long_document(random, cases.encoder)
        messages = [document_message(random, document)]
        prompts: list[list[Message]] = []
        texts: list[tuple[str, bool]] = []
        for fact in random.sample(document.facts, QUESTIONS_PER_CHAT):
            messages = [*messages, user(fact.question(random))]
            answer = cases.client.chat(messages)
            prompts.append(messages)
            texts.append((answer.text, len(texts) == 0 or answer.cached_tokens > DOCUMENT_TOKENS[0] // 2))
            messages = [*messages, assistant(answer.text)]
        salt = f"{cases.first_seed} {index}"
        again = cases.client.chats(
            {"messages": prompt, "cache_salt": f"{salt} {turn}"} for turn, prompt in enumerate(prompts)
        )
        same += [
            was_cached and answer.cached_tokens == 0 and answer.text == text
            for (text, was_cached), answer in zip(texts, again, strict=True)
        ]
    return {"recall_cached_same": percent(same)}


def tool_call(cases: Cases) -> Rows:
    """Ask for what one of four tools does, by a rendered prompt, and read the call from the raw text."""
    tasks = [draw_tool_task(cases.random("tool", index)) for index in range(cases.num_cases)]
    prompts = [cases.prompt(Chat("tool", [user(task.request)], task.schemas)) for task in tasks]
    answers = cases.client.completions({"prompt": prompt} for prompt in prompts)
    right = [
        called(answer.text) == {"name": task.name, "arguments": task.arguments}
        for task, answer in zip(tasks, answers, strict=True)
    ]
    return {"tool_call": percent(right)}


def called(text: str) -> Any:
    """Return the one call in the raw text of an answer, or None."""
    match = re.fullmatch(r"\s*<tool_call>\n(.*)\n</tool_call>\s*", text, re.DOTALL)
    try:
        return json.loads(match[1]) if match else None
    except ValueError:
        return None


def json_answers(cases: Cases) -> Rows:
    """Ask for JSON for a schema; `json` is what fits it, `json_values` what has the right values as well."""
    randoms = [cases.random("json", index) for index in range(cases.num_cases)]
    tasks = [draw_json_task(random) for random in randoms]
    bodies = [{"messages": json_messages(random, task)} for random, task in zip(randoms, tasks, strict=True)]
    answers = cases.client.chats(bodies)
    valid = [fits(task.schema, answer.text) for task, answer in zip(tasks, answers, strict=True)]
    exact = [
        is_valid and json.loads(answer.text) == task.value
        for task, answer, is_valid in zip(tasks, answers, valid, strict=True)
    ]
    return {"json": percent(valid), "json_values": percent(exact)}


def thinking(cases: Cases) -> Rows:
    """Ask for sums of two-digit numbers by a rendered prompt that lets the model think first."""
    randoms = [cases.random("thinking", index) for index in range(cases.num_cases)]
    tasks = [draw_task(random, large=True) for random in randoms]
    chats = [
        Chat("arithmetic", [user(random.choice(QUESTIONS).format(task))], thinking=True)
        for random, (task, _, _) in zip(randoms, tasks, strict=True)
    ]
    answers = cases.client.completions({"prompt": cases.prompt(chat)} for chat in chats)
    right = [
        bool(re.fullmatch(rf"<think>\n.+\n</think>\n\n{re.escape(task)} = {result}\.", answer.text, re.DOTALL))
        for (task, result, _), answer in zip(tasks, answers, strict=True)
    ]
    return {"arithmetic": percent(right)}


def stories(cases: Cases) -> Rows:
    """Ask for stories, sampled as the checkpoint suggests; and plant a fault in each of as many good ones."""
    randoms = [cases.random("story", index) for index in range(cases.num_cases)]
    pairs = [random.sample(words.NAMES, 2) for random in randoms]
    bodies = [
        {"messages": [user(f"Tell me a story about {hero} and {helper}.")], "temperature": None, "seed": index}
        for index, (hero, helper) in enumerate(pairs)
    ]
    good = [is_consistent(answer.text) for answer in cases.client.chats(bodies)]
    refused = [not is_consistent(spoilt(random, make_story(random))) for random in randoms]
    return {"story": percent(good), "story_checker": percent(refused)}


def spoilt(random: Random, story: Story) -> str:
    """Return the story with one name swapped for the other, or one word with a letter too many."""
    pieces = re.findall(r"\w+|\W+", story.text)
    hero, helper = story.slots["hero"], story.slots["helper"]
    spoil: Callable[[str], str]
    if random.random() < 0.5:
        places = [index for index, piece in enumerate(pieces) if piece in (hero, helper)]
        spoil = lambda name: helper if name == hero else hero  # noqa: E731 - one of two
    else:
        places = [index for index, piece in enumerate(pieces) if piece.isalpha()]
        spoil = lambda word: word + random.choice("bdkqvx")  # noqa: E731 - one of two
    place = random.choice(places)
    pieces[place] = spoil(pieces[place])
    return "".join(pieces)


def bits_per_byte(cases: Cases) -> Rows:
    """Measure what the server's prompt logprobs say of held-out chats of the mixture."""
    texts = []
    for index in range(max(1, cases.num_cases // 4)):
        random = cases.random("bits", index)
        chat = draw_document_chat(random, 8) if index % 2 else draw_short_chat(random)
        texts.append(cases.encoder.render(chat))
    answers = cases.client.completions({"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0} for text in texts)
    nats = sum(-value for answer in answers for value in answer.logprobs["token_logprobs"] if value is not None)
    return {"bits_per_byte": nats / math.log(2) / sum(len(text.encode()) for text in texts)}
