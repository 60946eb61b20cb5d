"""Clients that ask until they are told to stop, and the tally of what they received.

Each client is a thread with a generator of its own. What it receives is compared with the undisturbed answer. A request
that ends otherwise is somebody's fault: its client's, if it left; a disturbance's, if that allows it; another's, which
must not be.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from difflib import SequenceMatcher
from typing import Any

import attrs

from tests.chaos.disturbances import Timeline
from tests.chaos.questions import Answer, Clients, Content, Failed, Manner, Question, Refused, ask, fresh_question
from tests.e2e.servers import Server
from tests.near import same

REFUSALS = {"disk full", "descriptors lowered", "memory lowered"}
"""Disturbances in which a server may refuse new requests."""
SHORTAGES = {"memory lowered": ("memory", "thread"), "engine short of memory": ("memory",)}
"""Disturbances that may make a request fail, with words that its error must then contain."""
MAX_TOLD = 50


@attrs.define
class Tally:
    streams_finished: int = 0
    plain_finished: int = 0
    left: int = 0
    """Requests whose client closed its connection on purpose."""
    refused: int = 0
    """Requests that were refused while a disturbance allowed it."""
    failed_of_shortage: int = 0
    """Requests that failed because memory was taken from the process that served them."""
    failed_for_others: int = 0
    tokens_lost: int = 0
    tokens_doubled: int = 0
    answers_wrong: int = 0
    by_question: Counter[str] = attrs.field(factory=Counter)
    finished_ids: dict[str, int | None] = attrs.field(factory=dict)
    """By request id: completion tokens, if its client was told."""
    seen_ids: set[str] = attrs.field(factory=set)
    problems: list[str] = attrs.field(factory=list)
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def tell(self, problem: str) -> None:
        if len(self.problems) < MAX_TOLD:
            self.problems.append(problem)


def ask_undisturbed(server: Server, questions: list[Question]) -> list[Question]:
    """Ask each question, and return it with the answer that it must get from now on."""
    clients = Clients(server)
    try:
        return [attrs.evolve(each, expected=ask(each, clients, Manner()).content) for each in questions]
    finally:
        clients.close()


def run_client(
    server: Server,
    questions: list[Question],
    tally: Tally,
    timeline: Timeline,
    stopping: threading.Event,
    *,
    tag: str,
    long: int,
    asks_fresh: bool,
) -> None:
    """Ask until told to stop."""
    rng = random.Random(tag)
    clients = Clients(server)
    try:
        while not stopping.is_set():
            if asks_fresh and rng.random() < 0.5:
                question = fresh_question(rng, streams=rng.random() < 0.7, long=long)
            else:
                question = rng.choice(questions)
            drawn = rng.random()
            manner = Manner()
            if drawn < 0.15 and question.streams:
                manner = Manner(leaves_after=rng.randrange(1, long))
            elif drawn < 0.3:
                manner = Manner(pauses_s=rng.uniform(0.001, 0.05))
            if not _ask_once(question, clients, manner, tally, timeline):
                stopping.wait(rng.uniform(0.05, 0.5))
    finally:
        clients.close()


def _ask_once(question: Question, clients: Clients, manner: Manner, tally: Tally, timeline: Timeline) -> bool:
    """Ask one question and count the outcome. Returns whether it was answered."""
    begun = time.monotonic()
    try:
        answer = ask(question, clients, manner)
    except (Refused, Failed) as error:
        with tally.lock:
            blame(error, question, timeline.kinds(clients.server, begun), tally)
        return False
    with tally.lock:
        if answer.request_id is not None:
            tally.seen_ids.add(answer.request_id)
        if answer.has_left:
            tally.left += 1
        else:
            check(question, answer, tally)
    return True


def blame(error: Exception, question: Question, kinds: set[str], tally: Tally) -> None:
    """Count a request that was not answered. `kinds`: what was disturbed meanwhile."""
    text = str(error)
    if isinstance(error, Refused) and kinds & REFUSALS:
        tally.refused += 1
    elif any(kind in kinds and any(word in text.lower() for word in words) for kind, words in SHORTAGES.items()):
        tally.failed_of_shortage += 1
    else:
        tally.failed_for_others += 1
        tally.tell(f"{question.name}: {type(error).__name__}: {text[:300]} (disturbed: {sorted(kinds)})")


def check(question: Question, answer: Answer, tally: Tally) -> None:
    """Count a complete answer, and compare it with what it must be."""
    tally.by_question[question.name] += 1
    tally.streams_finished += question.streams
    tally.plain_finished += not question.streams
    if answer.request_id is not None:
        content = answer.content
        usage = content["usage"][1] if "usage" in content else content.get("tokens")
        tally.finished_ids[answer.request_id] = usage
    assert question.expected is not None
    if agree(answer.content, question.expected):
        return
    tally.answers_wrong += 1
    lost, doubled = differences(answer.content, question.expected)
    tally.tokens_lost += lost
    tally.tokens_doubled += doubled
    tally.tell(f"{question.name}: {answer.content!r:.800} instead of {question.expected!r:.800}")


def agree(found: Content, expected: Content) -> bool:
    """Return whether everything that is expected was found; what nobody expects is ignored."""
    for name, value in expected.items():
        if isinstance(value, dict):
            if name not in found or not agree(found[name], value):
                return False
        elif not same(found.get(name), value):
            return False
    return True


def differences(found: Content, expected: Content) -> tuple[int, int]:
    """Return how many tokens, or characters where there are no ids, are missing and how many are too many."""
    lost = doubled = 0
    pairs: list[tuple[Any, Any]] = [(found.get("text", ""), expected.get("text", ""))]
    for index, choice in expected.get("choices", {}).items():
        other = found.get("choices", {}).get(index, {})
        by = "token_ids" if choice.get("token_ids") else "text"
        pairs.append((other.get(by, ""), choice[by]))
    for got, wanted in pairs:
        common = sum(block.size for block in SequenceMatcher(None, got, wanted, autojunk=False).get_matching_blocks())
        lost += len(wanted) - common
        doubled += len(got) - common
    return lost, doubled
