"""Documents of many facts, with questions about them over several turns: what a prefix cache must not get wrong.

The values are drawn at random, so that an answer can only come from the document.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .chats import Chat, Message, assistant, system, user
from .facts import RELATIONS, Fact, draw_facts
from .scenery import LEAD_INS, filler
from .words import NAMES

TITLES = ("Notes from the village", "What we know about our neighbours", "The village book", "People of the valley")
INSTRUCTIONS = (
    "Answer questions about this text.", "Use this text to answer the questions.", "Here is a text. Answer from it.",
    "You answer questions about the following text.",
)  # fmt: skip
UNKNOWN = "The text does not say that."
NO_TEXT = "I do not know. There is no text that says it."


@dataclass(frozen=True)
class Document:
    """A text and its facts, in the order in which the text states them."""

    text: str
    facts: tuple[Fact, ...]


def make_document(random: Random, num_facts: int, num_fillers: int) -> Document:
    """Make a text of `num_facts` facts among `num_fillers` other sentences, in paragraphs of about six facts."""
    facts = draw_facts(random, num_facts)
    sentences = [random.choice(LEAD_INS) + fact.statement for fact in facts]
    fillers = [0] * len(sentences)
    for _ in range(num_fillers):
        fillers[random.randrange(len(fillers))] += 1
    paragraphs: list[list[str]] = [[]]
    for index, (sentence, count) in enumerate(zip(sentences, fillers, strict=True)):
        if index and index % 6 == 0:
            paragraphs.append([])
        paragraphs[-1] += [filler(random) for _ in range(count)] + [sentence]
    text = "\n\n".join(" ".join(paragraph) for paragraph in paragraphs)
    return Document(f"{random.choice(TITLES)}\n\n{text}", tuple(facts))


def document_message(random: Random, document: Document) -> Message:
    return system(f"{random.choice(INSTRUCTIONS)}\n\n{document.text}")


def unknown_question(random: Random, document: Document) -> str:
    known = {(fact.person, fact.relation.name) for fact in document.facts}
    while True:
        fact = Fact(random.choice(NAMES), random.choice(RELATIONS), "")
        if (fact.person, fact.relation.name) not in known:
            return fact.question(random)


def recall_chat(random: Random, num_facts: int, num_fillers: int, num_questions: int) -> Chat:
    """Make a chat of `num_questions` questions about a document, some of which the document does not answer."""
    document = make_document(random, num_facts, num_fillers)
    messages = [document_message(random, document)]
    in_user_message = random.random() < 0.2
    thinking = random.random() < 0.1
    for fact in random.sample(document.facts, min(num_questions, len(document.facts))):
        if random.random() < 0.03:
            messages += [user(unknown_question(random, document)), _answered(UNKNOWN, None, thinking)]
        else:
            messages += [user(fact.question(random)), _answered(fact.statement, fact, thinking)]
    if in_user_message:
        messages[:2] = [user(f"{messages[0]['content']}\n\n{messages[1]['content']}")]
    return Chat("recall", messages, thinking=thinking)


def unknown_chat(random: Random) -> Chat:
    """Make a chat with a question about people of whom no text was given."""
    fact = draw_facts(random, 1)[0]
    thinking = random.random() < 0.1
    messages = [user(fact.question(random)), _answered(NO_TEXT, None, thinking)]
    return Chat("recall", messages, thinking=thinking)


def _answered(answer: str, fact: Fact | None, thinking: bool) -> Message:
    if not thinking:
        return assistant(answer)
    if fact is None:
        return assistant(answer, "I look for it in the text, but it is not there.")
    return assistant(answer, f"The question is about {fact.person}. The text says: {answer}")
