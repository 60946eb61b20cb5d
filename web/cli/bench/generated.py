"""Datasets generated from the seed: random, shared-prefix, multi-turn; and the prompts of the warm-up.

Each random value has a key of the seed, a number for its kind, and its index, so a dataset does not change when another
flag makes it longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import attrs

from .prompts import Lengths, Wording, draw_ids
from .workload import Ask, Conversation, Workload, single_turns


class Kind(IntEnum):
    """The number after the seed in a key. Append new ones, so that the others keep their prompts."""

    PROMPT = 0
    PROMPT_LENGTH = 1
    OUTPUT_LENGTH = 2
    PREFIX = 3
    SUFFIX = 4
    WARM_UP = 5
    TRACE_BLOCK = 6
    ARRIVALS = 7


@attrs.frozen
class RandomPrompts:
    """Prompts without common prefixes."""

    wording: Wording
    seed: int
    input_lengths: Lengths
    output_lengths: Lengths

    def ask(self, place: int, kind: Kind = Kind.PROMPT) -> Ask:
        length = self.input_lengths.draw(self.seed, Kind.PROMPT_LENGTH, place)
        ids = draw_ids(self.wording.tokens, length, self.seed, kind, place)
        max_tokens = self.output_lengths.draw(self.seed, Kind.OUTPUT_LENGTH, place)
        return Ask({**self.wording.fields(ids), "max_tokens": max_tokens})

    def workload(self, num_prompts: int) -> Workload:
        return single_turns(num_prompts, self.ask)


@attrs.frozen
class SharedPrefixes:
    """Prompts of a shared prefix and a suffix of their own. The prefixes are used in turn."""

    wording: Wording
    seed: int
    num_prefixes: int
    prefix_len: int
    suffix_len: int
    output_len: int

    def ask(self, place: int) -> Ask:
        tokens = self.wording.tokens
        prefix = draw_ids(tokens, self.prefix_len, self.seed, Kind.PREFIX, place % self.num_prefixes)
        suffix = draw_ids(tokens, self.suffix_len, self.seed, Kind.SUFFIX, place)
        return Ask({**self.wording.fields([*prefix, *suffix]), "max_tokens": self.output_len})

    def workload(self, num_prompts: int) -> Workload:
        return single_turns(num_prompts, self.ask)


@attrs.frozen
class MultiTurn:
    """Conversations whose turns contain all earlier ones; as text, since only the server knows a response's ids."""

    wording: Wording
    seed: int
    num_turns: int
    input_lengths: Lengths
    output_lengths: Lengths

    def ask(self, place: int, answers: Sequence[str]) -> Ask:
        says = [self._user(place, turn) for turn in range(len(answers) + 1)]
        max_tokens = self.output_lengths.draw(self.seed, Kind.OUTPUT_LENGTH, place, len(answers))
        if not self.wording.is_chat:
            history = "".join(f"{said}\n{answer}\n" for said, answer in zip(says, answers, strict=False))
            return Ask({"prompt": history + says[-1], "max_tokens": max_tokens})
        messages: list[dict[str, Any]] = []
        for said, answer in zip(says, answers, strict=False):
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": says[-1]})
        return Ask({"messages": messages, "max_tokens": max_tokens})

    def _user(self, place: int, turn: int) -> str:
        length = self.input_lengths.draw(self.seed, Kind.PROMPT_LENGTH, place, turn)
        return self.wording.text(draw_ids(self.wording.tokens, length, self.seed, Kind.PROMPT, place, turn))

    def workload(self, num_conversations: int) -> Workload:
        def open_conversation(place: int) -> Conversation:
            return Conversation(self.num_turns, lambda answers: self.ask(place, answers))

        return Workload(num_conversations, num_conversations * self.num_turns, open_conversation)
