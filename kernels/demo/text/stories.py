"""Stories of five to eight sentences about a hero with a goal.

A plot is a sequence of steps; a step is a choice of sentences with slots. A slot is filled by the same word throughout:
who is who, which thing is wanted, where things happen (`bench/demo_judges.py` checks that).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from . import words
from .chats import Chat, assistant, system, user

Step = tuple[str, ...]

SLOTS: dict[str, tuple[str, ...]] = {
    "hero": words.NAMES, "helper": words.NAMES, "thing": words.THINGS, "colour": words.COLOURS, "town": words.TOWNS,
    "trade": words.TRADES, "place": words.PLACES, "other": words.PLACES, "animal": words.ANIMALS, "day": words.DAYS,
    "dish": words.DISHES, "ground": words.OPEN_PLACES, "shelter": words.SHELTERS, "workplace": words.WORKPLACES,
}  # fmt: skip
"""What may fill each slot. `{He}`, `{he}` and `{his}` are the hero's pronouns, and `{an_animal}` and `{a_trade}` have an
article."""

INTRODUCTION: Step = (
    "Once upon a time {hero} lived in {town}.",
    "{hero} was {a_trade} in {town}.",
    "In {town} there lived {a_trade} called {hero}.",
    "There was once {a_trade} in {town} whose name was {hero}.",
)
MOOD: Step = (
    "",
    "It was a warm day in spring.",
    "It was a cold morning, and the streets were still empty.",
    "It had rained all night.",
    "The sun was shining.",
)
ENDING: Step = (
    "From that day on, {hero} and {helper} were the best of friends.",
    "{hero} thanked {helper}, and they ate {dish} together.",
    "That evening {hero} and {helper} sat by the fire and ate {dish}.",
    "{hero} never forgot what {helper} had done.",
)
LAST: Step = ("", "", "And so the day came to a happy end.", "Then they both laughed until it was dark.")

PLOTS: dict[str, tuple[Step, ...]] = {
    "lost": (
        INTRODUCTION,
        ("One {day}, {hero} lost a {colour} {thing}.", "On a {day}, {his} {colour} {thing} was gone.",
         "One {day}, {hero} could not find {his} {colour} {thing}."),
        MOOD,
        ("{He} looked for it in the {place}, but it was not there.", "{He} went to the {place}, but there was no {thing}.",
         "{He} searched the whole {place} and found nothing."),
        ("Then {he} met {helper}, who had {an_animal}.", "A friend called {helper} came by with {an_animal}.",
         "{He} asked {helper}, who was out for a walk with {an_animal}."),
        ("\"I will help you, {hero},\" said {helper}.", "\"Do not be sad, {hero},\" said {helper}, \"let us look together.\""),
        ("The {animal} ran to the {other}, and there lay the {colour} {thing}.",
         "In the {other} the {animal} stopped, and there was the {thing}.",
         "{helper} looked in the {other} and saw the {colour} {thing}."),
        ENDING,
        LAST,
    ),
    "present": (
        INTRODUCTION,
        ("{He} wanted to give {helper} a {thing}.", "{He} had a good friend, {helper}, who wished for a {thing}.",
         "It was the birthday of {helper}, and {hero} wanted to bring a {thing}."),
        ("But {he} had no money.", "But a {thing} was too dear for {his} small purse.", "But there was no {thing} in the shop."),
        MOOD,
        ("So {hero} went to the {workplace} and looked for wood.", "So {he} worked in the {workplace} for three days.",
         "So {hero} helped in the {workplace} until {day}."),
        ("Then {he} made a {thing} and painted it {colour}.", "There {he} found an old {thing} and painted it {colour}.",
         "There {he} made a fine {colour} {thing}."),
        ("\"What a beautiful {thing}!\" said {helper}.", "\"I have never seen such a {colour} {thing},\" said {helper}.",
         "{helper} took the {colour} {thing} and smiled."),
        ENDING,
        LAST,
    ),
    "storm": (
        INTRODUCTION,
        ("{He} had {an_animal} that slept in the {shelter}.", "In the {shelter} {he} kept {an_animal}.",
         "{His} {animal} lived in the {shelter}."),
        ("One {day}, a storm came over the hills.", "One {day}, the river rose higher than ever before.",
         "On a {day}, the wind tore the roof from the {shelter}."),
        ("The {animal} was afraid and ran to the {other}.", "The {animal} ran away and hid in the {other}."),
        ("{hero} called for it, but no answer came.", "{hero} took a lamp and went out into the dark."),
        ("Then {helper} came from the {other} with the {animal}.", "But {helper} had heard the {animal} and brought it back.",
         "In the {other} stood {helper} and held the {animal}."),
        ("\"Thank you, {helper}!\" said {hero}.", "\"Here is your {animal}, {hero},\" said {helper}.", ""),
        ENDING,
        LAST,
    ),
    "fair": (
        INTRODUCTION,
        ("Every {day} there was a fair by the {ground}.", "On {day} there was a fair by the {ground}."),
        MOOD,
        ("{hero} wanted to win the {colour} {thing}.", "The prize was a {colour} {thing}, and {hero} wanted it very much.",
         "Who ran fastest to the {other} would win a {colour} {thing}."),
        ("But {helper} fell on the way, and {hero} stopped to help.", "{hero} was first, but then {he} saw that {helper} had fallen.",
         "Near the {other} {hero} saw {helper}, who could not walk."),
        ("So {an_animal} came first, and everybody laughed.", "So {an_animal} won the {thing}."),
        ("\"You are a true friend, {hero},\" said {helper}.", "\"I am sorry about the {thing}, {hero},\" said {helper}."),
        ENDING,
        LAST,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Story:
    """A story, the plot that it follows, and the words in its slots."""

    plot: str
    text: str
    slots: dict[str, str]


def make_story(random: Random) -> Story:
    hero, helper = random.sample(words.NAMES, 2)
    slots = {name: random.choice(choices) for name, choices in SLOTS.items()} | {"hero": hero, "helper": helper}
    taken = {slots[name] for name in ("place", "ground", "shelter", "workplace")}
    slots["other"] = random.choice([place for place in words.PLACES if place not in taken])
    plot = random.choice(tuple(PLOTS))
    while True:
        sentences = [sentence for step in PLOTS[plot] if (sentence := random.choice(step))]
        if len(sentences) <= 8:
            break
    return Story(plot, " ".join(_fill(sentence, slots) for sentence in sentences), slots)


def story_chat(random: Random) -> Chat:
    """Make a chat in which somebody asks for a story."""
    story = make_story(random)
    names = f"{story.slots['hero']} and {story.slots['helper']}"
    requests = ["Tell me a story.", f"Tell me a story about {names}.", f"Please tell a story about {names}.",
                f"Write a short story about {names}.", "Write a short story.", "Can you tell me a story?"]  # fmt: skip
    thing = f"{story.slots['colour']} {story.slots['thing']}"
    if story.plot != "storm" and thing in story.text:
        requests.append(f"Tell me a story about a {thing}.")
    messages = [user(random.choice(requests))]
    if random.random() < 0.3:
        messages.insert(0, system(random.choice(("You tell stories.", "You are a friendly storyteller."))))
    thinking = random.random() < 0.1
    reasoning = f"I will tell a story about {names}." if thinking else None
    return Chat("story", [*messages, assistant(story.text, reasoning)], thinking=thinking)


def _fill(sentence: str, slots: dict[str, str]) -> str:
    he, his = words.pronouns(slots["hero"])
    return sentence.format(
        **slots, he=he, his=his, He=he.capitalize(), His=his.capitalize(),
        an_animal=words.article(slots["animal"]), a_trade=words.article(slots["trade"]),
    )  # fmt: skip
