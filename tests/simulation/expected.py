"""What a right server would answer: computed from the request alone, with no code of the server.

The fake executor writes a number for each token into the KV cache and draws by hashing what it reads there
(`kernels/fake.py`); here the same is said again, in a few lines, over lists. Texts and chats are encoded by the
library, chats after the few lines of the tiny model's template have been said again.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from functools import cache, lru_cache
from typing import Any

import attrs
from tokenizers import Tokenizer

from tests.simulation.arrival import FIRST_ID, NUM_IDS, Arrival
from tests.simulation.expected_calls import call_ends
from tests.simulation.expected_thoughts import END_OF_THOUGHT, THOUGHT, Course
from tests.tiny import TINY

MASK = (1 << 61) - 1
LOGPROB_STEPS = 1 << 20
VECTOR_SIZE = 16


@attrs.frozen
class Scored:
    """A token, its logprob, its rank, and the ids of the likeliest ones in its place."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[int, ...]


@attrs.frozen
class Answer:
    """One choice."""

    text: str
    token_ids: tuple[int, ...]
    reason: str
    stop: str | None = None
    """The stop string that has ended it..."""
    stop_token_id: int | None = None
    """...or the token."""
    scores: tuple[Scored, ...] = ()
    num_thoughts: int = 0
    """Tokens of its reasoning."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def _slot(token_id: int, position: int, adapter: str = "") -> int:
    added = zlib.crc32(adapter.encode()) if adapter else 0
    return (token_id * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + 1 + added) & MASK


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def encoded(text: str) -> tuple[int, ...]:
    return tuple(_tokenizer().encode(text, add_special_tokens=False).ids)


def rendered(contents: tuple[str, ...], tools: tuple[str, ...] = ()) -> str:
    """Return a chat as the template of the tiny model writes it, with tools in a system message."""
    turns = [(role_of(number), content) for number, content in enumerate(contents)]
    if tools:
        listed = "\n".join(json.dumps(tool_definition(name)) for name in tools)
        asked = 'To call one, write <tool_call>{"name": its name, "arguments": an object}</tool_call>.'
        turns.insert(0, ("system", f"These tools can be called:\n<tools>\n{listed}\n</tools>\n{asked}"))
    written = (f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return "".join(written) + "<|im_start|>assistant\n"


def tool_definition(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def role_of(number: int) -> str:
    return ("user", "assistant")[number % 2]


def position_of(contents: tuple[str, ...], message: int, num_chars: int) -> int:
    """Return how many tokens of a chat lie before a place in the content of a message."""
    before = "".join(f"<|im_start|>{role_of(i)}\n{text}<|im_end|>\n" for i, text in enumerate(contents[:message]))
    until = len(before) + len(f"<|im_start|>{role_of(message)}\n") + num_chars
    ends = [end for _, end in _tokenizer().encode(rendered(contents), add_special_tokens=False).offsets]
    return sum(end <= until for end in ends)


def choice_seed(seed: int, part: int, choice: int) -> int:
    """Return the seed of a choice: the very first has the request's own, the others one that is derived from it."""
    if part == choice == 0:
        return seed
    place = seed.to_bytes(8, "little") + part.to_bytes(4, "little") + choice.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little")


@lru_cache(maxsize=4096)
def answer_to(arrival: Arrival, eos_token_ids: tuple[int, ...], choice: int = 0, adapter: str = "") -> Answer:
    """Return what a choice of a request's first prompt is, if nothing cuts it. `adapter`: the digest of its adapter."""
    slots = [_slot(token_id, position, adapter) for position, token_id in enumerate(arrival.prompt)]
    if arrival.is_embedded:
        return Answer("", (), "length")
    seed = choice_seed(arrival.seed, arrival.part, choice) if arrival.temperature > 0 else 0
    heeds_eos = not arrival.ignores_eos or arrival.grammar  # which says where an output may end
    ends = (*arrival.stop_token_ids, *(eos_token_ids if heeds_eos else ()))
    text = ""
    drawn: tuple[int, ...] = ()
    scores: tuple[Scored, ...] = ()
    course = Course(arrival, encoded(THOUGHT), encoded(END_OF_THOUGHT), eos_token_ids)

    def ended(text: str, reason: str, stop: str | None = None, stop_token_id: int | None = None) -> Answer:
        return Answer(text, drawn, reason, stop, stop_token_id, scores, course.num_thoughts)

    for position in range(arrival.max_tokens):
        token_id = FIRST_ID + (hash((seed & MASK, position, *slots)) & MASK) % NUM_IDS
        token_id = course.next_token(token_id)
        if arrival.logprobs is not None:
            scores += (score(slots, token_id, arrival.logprobs),)
        slots.append(_slot(token_id, len(slots), adapter))
        drawn += (token_id,)
        course.add(token_id)
        is_last = token_id in ends
        if is_last and not arrival.include_stop:
            return ended(text, "stop", stop_token_id=token_id)
        text = str(_tokenizer().decode(list(drawn)))
        found = [(at + len(stop), at, stop) for stop in arrival.stop if (at := text.find(stop)) >= 0]
        if found:
            end, at, stop = min(found)
            return ended(text[: end if arrival.include_stop else at], "stop", stop)
        if arrival.max_calls is not None and len(calls := call_ends(text, arrival.tools)) >= arrival.max_calls:
            return ended(text[: calls[arrival.max_calls - 1]], "stop")
        if is_last:
            return ended(text, "stop", stop_token_id=token_id)
    return ended(text, "length")


def vector_of(arrival: Arrival, adapter: str = "") -> list[float]:
    """Return the vector of a prompt: the output of its last token, of length 1."""
    mixed = hash(tuple(_slot(token_id, at, adapter) for at, token_id in enumerate(arrival.prompt))) & MASK
    elements = [_slot(i, mixed) % (2 * LOGPROB_STEPS) / LOGPROB_STEPS - 1.0 for i in range(VECTOR_SIZE)]
    return [element / math.hypot(*elements) for element in elements]


def prompt_scores(arrival: Arrival, adapter: str = "") -> tuple[Scored, ...]:
    """Return the scores of all tokens of a prompt but the first."""
    slots = [_slot(token_id, position, adapter) for position, token_id in enumerate(arrival.prompt)]
    assert arrival.prompt_logprobs is not None
    return tuple(
        score(slots[:position], arrival.prompt[position], arrival.prompt_logprobs) for position in range(1, len(slots))
    )


def score(slots: list[int], token_id: int, num_top: int) -> Scored:
    """Return the made-up score of a token after these slots."""
    mixed = hash(tuple(slots)) & MASK
    ids = range(FIRST_ID, FIRST_ID + NUM_IDS)
    parts = {i: _slot(i, mixed) % LOGPROB_STEPS for i in (*ids, token_id)}
    order = sorted(ids, key=lambda i: (parts[i], i))
    is_drawable = token_id in ids
    logprob = (-1.0 if is_drawable else -3.0) - parts[token_id] / LOGPROB_STEPS
    rank = order.index(token_id) + 1 if is_drawable else len(order) + 1
    return Scored(token_id, logprob, rank, tuple(order[:num_top]))
