"""Facts about people, and questions about them: who lives where, plays what, keeps which animal.

A fact is stated in the same words in the text and in the answer, with the person and the property at most four tokens
before the value, by which a small model finds it. Two facts of a document never have the same person and relation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from . import words
from .words import article


@dataclass(frozen=True)
class Relation:
    """A property that a person has: `{n}` is the person's name and `{v}` the value, in all sentences."""

    name: str
    values: Callable[[Random], str]
    statement: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Fact:
    person: str
    relation: Relation
    value: str

    @property
    def statement(self) -> str:
        """The sentence that states the fact and answers a question about it."""
        return self.relation.statement.format(n=self.person, v=self.value)

    def question(self, random: Random) -> str:
        return random.choice(self.relation.questions).format(n=self.person)


def _one_of(values: tuple[str, ...], form: Callable[[str], str] = str) -> Callable[[Random], str]:
    return lambda random: form(random.choice(values))


def _password(random: Random) -> str:
    return "".join(random.choice(words.SYLLABLES) for _ in range(random.randint(2, 4)))


def _number(random: Random) -> str:
    return str(random.randint(10, 99))


RELATIONS = (
    Relation("colour", _one_of(words.COLOURS), "{n} loves the colour {v}.",
        ("What is {n}'s favourite colour?", "Which colour does {n} love?")),
    Relation("door", _one_of(words.COLOURS), "{n}'s door is {v}.",
        ("What colour is {n}'s door?", "Which colour has {n}'s door?")),
    Relation("town", _one_of(words.TOWNS), "{n} lives in {v}.",
        ("Where does {n} live?", "In which town does {n} live?")),
    Relation("birthplace", _one_of(words.TOWNS), "{n} was born in {v}.",
        ("Where was {n} born?", "In which town was {n} born?")),
    Relation("trade", _one_of(words.TRADES, article), "{n} works as {v}.",
        ("What does {n} work as?", "What is {n}'s job?")),
    Relation("pet", _one_of(words.ANIMALS, article), "{n} keeps {v}.",
        ("Which animal does {n} keep?", "What kind of pet has {n}?")),
    Relation("fruit", _one_of(words.FRUITS, article), "{n} picked {v}.",
        ("Which fruit did {n} pick?", "What did {n} pick?")),
    Relation("instrument", _one_of(words.INSTRUMENTS), "{n} plays the {v}.",
        ("Which instrument does {n} play?", "What does {n} play?")),
    Relation("tree", _one_of(words.TREES, article), "{n} planted {v}.",
        ("Which tree did {n} plant?", "What did {n} plant?")),
    Relation("dish", _one_of(words.DISHES), "{n} likes to eat {v}.",
        ("What does {n} like to eat?", "What is {n}'s favourite dish?")),
    Relation("drink", _one_of(words.DRINKS), "{n} drinks {v}.",
        ("What does {n} drink?", "What is {n}'s favourite drink?")),
    Relation("found", _one_of(words.THINGS, article), "{n} found {v}.",
        ("What did {n} find?", "Which thing did {n} find?")),
    Relation("hidden", _one_of(words.HIDING_PLACES), "{n} hid under the {v}.",
        ("Where did {n} hide?", "Under what did {n} hide?")),
    Relation("subject", _one_of(words.SUBJECTS), "{n} reads about {v}.",
        ("What does {n} read about?", "What are {n}'s books about?")),
    Relation("number", _number, "{n} drew number {v}.",
        ("Which number did {n} draw?", "What is {n}'s number?")),
    Relation("password", _password, "{n}'s password is {v}.",
        ("What is {n}'s password?", "Which password has {n}?")),
)  # fmt: skip


def draw_facts(random: Random, num_facts: int) -> list[Fact]:
    """Draw facts about people, at least a third as many and at most 100, each with at most 16 facts."""
    num_people = min(len(words.NAMES), random.randint(-(-num_facts // 3), num_facts))
    people = random.sample(words.NAMES, num_people)
    pairs = {(person, random.choice(RELATIONS)) for person in people}
    while len(pairs) < num_facts:
        pairs.add((random.choice(people), random.choice(RELATIONS)))
    facts = [Fact(person, relation, relation.values(random)) for person, relation in sorted(pairs, key=_sort_key)]
    random.shuffle(facts)
    return facts


def _sort_key(pair: tuple[str, Relation]) -> tuple[str, str]:
    person, relation = pair
    return person, relation.name
