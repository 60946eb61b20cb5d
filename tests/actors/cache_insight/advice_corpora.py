"""Conversations that deserve one kind of advice each, and others that deserve none.

A conversation is the sequence of prompts that one client, or several clients of one application, send. Each is made
from a random generator, so that words, lengths and shapes differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import attrs

from quipu.actors.messages.explanations import AdviceCode
from quipu.actors.messages.prompts import ChatPart, ChatPrompt

WORDS = (
    *("quipu", "ledger", "knot", "cord", "census", "llama", "terrace", "valley"),
    *("road", "runner", "store", "maize", "bridge", "stone", "weave", "dye"),
    *("record", "reader", "count", "tribute", "harvest", "messenger", "river", "mountain"),
    *("market", "temple", "basket", "potter", "smith", "garden", "canal", "festival"),
)
Message = dict[str, Any]


@attrs.define
class Conversation:
    """Prompts in the order in which they are sent."""

    prompts: list[ChatPrompt] = attrs.field(factory=list)
    message: int | None = 0
    """The message that the advice must name."""
    answered_with_reasoning: set[int] = attrs.field(factory=set)
    """Indexes of prompts whose answers had reasoning."""

    def send(self, messages: list[Message], tools: tuple[Mapping[str, Any], ...] = ()) -> None:
        parts = tuple(
            ChatPart(index, None, message["role"], index, len(message["content"]))
            for index, message in enumerate(messages)
        )
        self.prompts.append(ChatPrompt(tuple(map(dict, messages)), parts=parts, tools=tools))


def words(random: Random, low: int = 12, high: int = 60) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(low, high))).capitalize() + "."


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def call(name: str, arguments: Mapping[str, Any]) -> Message:
    return answer("", tool_calls=[{"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}])


def tool(random: Random, name: str) -> Mapping[str, Any]:
    properties = {word: {"type": "string", "description": words(random, 3, 9)} for word in random.sample(WORDS, 3)}
    parameters = {"type": "object", "properties": properties, "required": [next(iter(properties))]}
    return {"type": "function", "function": {"name": name, "description": words(random), "parameters": parameters}}


def tools_of(random: Random, num: int = 4) -> tuple[Mapping[str, Any], ...]:
    return tuple(tool(random, f"{word}_{index}") for index, word in enumerate(random.sample(WORDS, num)))


def reversed_keys(value: Any) -> Any:
    """Return JSON with the keys of every object in the opposite order."""
    if isinstance(value, Mapping):
        return {key: reversed_keys(value[key]) for key in reversed(list(value))}
    return [reversed_keys(one) for one in value] if isinstance(value, list) else value


def turns(random: Random, opening: list[Message], num: int) -> Iterator[list[Message]]:
    """Yield the messages of each request of a growing conversation."""
    messages = [*opening, user(words(random))]
    yield list(messages)
    for _ in range(num - 1):
        messages += [answer(words(random)), user(words(random))]
        yield list(messages)


def stamp(random: Random) -> str:
    """Return a random time or id."""
    number = random.getrandbits(40)
    return random.choice(
        (
            f"2026-{1 + number % 12:02}-{1 + number % 28:02}T{number % 24:02}:{number % 60:02}:00.{number}Z",
            f"Tuesday, November {1 + number % 28}, {number % 24}:{number % 60:02}:{number % 59:02} PM ({number})",
            f"{number:010x}-{number % 9999:04}-4abc-{number:012x}0",
        )
    )


# ---------------------------------------------------------------- conversations that deserve advice


def volatile_prefix(random: Random) -> Conversation:
    """Put a changing time or id into the system prompt of each request, or into the first message of the user."""
    made, rest = Conversation(), words(random, 30, 90)
    form = random.choice(("at the beginning", "at the end", "one turn", "user"))
    if form == "one turn":
        for _ in range(4):
            made.send([system(f"Now: {stamp(random)}. {rest}"), user(words(random))])
        return made
    if form == "user":
        question = words(random, 30, 90)
        for messages in turns(random, [], 4):
            made.send([user(f"[{stamp(random)}] {question}"), *messages[1:]])
        return made
    for messages in turns(random, [system(rest)], random.randint(3, 6)):
        now = f"The time is {stamp(random)}."
        made.send([system(f"{now} {rest}" if form == "at the beginning" else f"{rest} {now}"), *messages[1:]])
    return made


def tools_reordered(random: Random) -> Conversation:
    """Send the same tools in another order at each turn."""
    made, tools = Conversation(message=None), list(tools_of(random, random.randint(2, 8)))
    for messages in turns(random, [system(words(random))], 4):
        made.send(messages, tuple(tools))
        tools = [*tools[1:], tools[0]]
    return made


def keys_reordered(random: Random) -> Conversation:
    """Change the order of keys in the JSON of a tool, of a call's arguments or of a result in a later request."""
    form = random.choice(("tool", "arguments", "result"))
    tools = tools_of(random)
    opening = [system(words(random)), *([user(words(random)), answer(words(random))] * random.randint(0, 2))]
    values = {word: {"a": words(random, 2, 5), "b": random.randint(0, 99)} for word in random.sample(WORDS, 3)}
    made = Conversation(message=None)
    first = [*opening, user(words(random))]
    made.send(first, tools)
    if form == "tool":
        made.send([*first, answer(words(random)), user(words(random))], (tools[0], reversed_keys(tools[1]), *tools[2:]))
        return made
    made.message = len(first) + (form == "result")
    whole: list[list[Message]] = []
    for value in (values, reversed_keys(values)):
        arguments, result = (value, {}) if form == "arguments" else ({}, value)
        content = json.dumps(result, indent=random.choice((None, 2)) if form == "result" else None)
        whole.append([*first, call("find", arguments), {"role": "tool", "content": content}])
    made.send(whole[0], tools)
    made.send([*whole[1], answer(words(random)), user(words(random))], tools)
    return made


def per_session_header(random: Random) -> Conversation:
    """Have several sessions of one application whose system prompts begin with an id of the session."""
    made, rest = Conversation(), words(random, 40, 90)
    name = random.choice(("Session", "x-trace", "Conversation id"))
    for _ in range(3):
        header = f"{name}: {stamp(random)}\n"
        for messages in turns(random, [system(header + rest)], random.randint(2, 4)):
            made.send(messages)
    return made


def reasoning_stripped(random: Random) -> Conversation:
    """Send an answer without its reasoning, which an earlier request contained or which the server knows of."""
    made = Conversation()
    opening = [system(words(random)), user(words(random))]
    made.message = len(opening)
    result = {"role": "tool", "content": words(random)}
    if random.random() < 0.5:
        made.send(opening)
        made.answered_with_reasoning.add(0)
        made.send([*opening, call("find", {"what": words(random)}), result])
        return made
    said = {**call("find", {"what": words(random)}), "reasoning_content": words(random)}
    made.send([*opening, said, result])
    bare = {key: value for key, value in said.items() if key != "reasoning_content"}
    made.send([*opening, bare, result, answer(words(random)), user(words(random))])
    return made


def alternating_system_prompts(random: Random) -> Conversation:
    """Let two agents take turns in one conversation, each with its own system prompt."""
    made = Conversation()
    agents = [system(words(random)), system(words(random))]
    for number, messages in enumerate(turns(random, [agents[0]], random.randint(6, 9))):
        made.send([agents[number % 2], *messages[1:]])
    return made


MAKERS: Mapping[AdviceCode, Callable[[Random], Conversation]] = {
    AdviceCode.VOLATILE_PREFIX: volatile_prefix,
    AdviceCode.TOOLS_REORDERED: tools_reordered,
    AdviceCode.KEYS_REORDERED: keys_reordered,
    AdviceCode.PER_SESSION_HEADER: per_session_header,
    AdviceCode.REASONING_STRIPPED: reasoning_stripped,
    AdviceCode.ALTERNATING_SYSTEM_PROMPTS: alternating_system_prompts,
}
"""All codes except `pool_too_small`, which does not depend on prompts."""


# ---------------------------------------------------------------- conversations that deserve none


def blameless(random: Random, shared: list[Message], tools: tuple[Mapping[str, Any], ...]) -> Conversation:
    """Make a conversation of an application with this system prompt and these tools, as a well-behaved client would."""
    made = Conversation(message=None)
    form = random.choice(
        (
            "grows",
            "grows",
            "tools",
            "reasons",
            "edits",
            "branches",
            "repeats",
            "truncates",
            "numbers",
            "adds tools",
            "json",
        )
    )
    all_turns = list(turns(random, shared, random.randint(2, 6)))
    match form:
        case "grows":
            for messages in all_turns:
                made.send(messages, tools)
        case "tools" | "json":
            messages = list(all_turns[0])
            for _ in range(4):
                made.send(messages, tools)
                content = words(random) if form == "tools" else json.dumps({"b": random.random(), "a": words(random)})
                messages = [*messages, call("find", {"z": 1, "a": 2}), {"role": "tool", "content": content}]
        case "reasons":
            messages = list(all_turns[0])
            for number in range(4):
                made.send(messages, tools)
                made.answered_with_reasoning.add(number)
                said = answer(words(random), reasoning_content=words(random))
                messages = [*messages, said, user(words(random))]
        case "edits":
            made.send(all_turns[-1], tools)
            made.send([*all_turns[-1][:-1], user(words(random))], tools)
        case "branches":
            for _ in range(4):
                made.send([*all_turns[1], answer(words(random)), user(words(random))], tools)
        case "repeats":
            for _ in range(4):
                made.send(all_turns[-1], tools)
        case "truncates":
            long = [*all_turns[-1], answer(words(random)), user(words(random))]
            made.send(long, tools)
            made.send([*shared, *long[len(shared) + 2 :]], tools)
        case "numbers":
            for number in random.sample(range(100), 4):
                question = [*shared, user(f"What is {number} plus {number % 7}?")]
                made.send(question, tools)
                made.send([*question, answer(str(number + number % 7)), user(f"And {number} times 2?")], tools)
        case "adds tools":
            for number, messages in enumerate(all_turns):
                made.send(messages, tools[: number + 1])
    return made


def blameless_conversations(num: int) -> Iterator[Conversation]:
    """Make conversations, five for each application, some with the same first message."""
    random = Random(7)
    for number in range(num):
        if number % 5 == 0:
            shared = [system(words(random, 10, 120))] if random.random() < 0.8 else []
            tools = tools_of(random, 5) if random.random() < 0.5 else ()
        yield blameless(random, shared, tools)
