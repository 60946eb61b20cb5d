"""The mixture of chats that the model is trained on: a batch is drawn from a seed and a step alone.

A row of a batch begins with a chat about a document, or not, and is filled up with short chats of all kinds
(`quipu.kernels.demo.train`). What the tests and `bench.demo_model` draw comes from other seeds (`HELD_OUT`).
"""

from __future__ import annotations

from random import Random

from .arithmetic import arithmetic_chat
from .chats import Chat, system
from .json_answers import json_chat
from .recall import recall_chat, unknown_chat
from .repetition import repetition_chat
from .small_talk import INSTRUCTIONS, small_talk_chat, small_talk_turn
from .stories import story_chat
from .tool_chats import tool_chat

HELD_OUT = 1 << 40
"""Seeds from here on are never trained on."""

SHORT_KINDS = (
    (story_chat, 0.20), (arithmetic_chat, 0.15), (tool_chat, 0.28), (json_chat, 0.15), (small_talk_chat, 0.14),
    (repetition_chat, 0.06), (unknown_chat, 0.02),
)  # fmt: skip


def draw_short_chat(random: Random, repetition: float = 0.0) -> Chat:
    """Draw a chat of any kind but a document's; some get a system message, or small talk after them.

    `repetition` is the share of chats that only repeat words, besides those in the mixture.
    """
    if random.random() < repetition:
        return repetition_chat(random)
    kinds, weights = zip(*SHORT_KINDS, strict=True)
    chat: Chat = random.choices(kinds, weights)[0](random)
    if not chat.tools and not chat.thinking and random.random() < 0.1:
        chat.messages += small_talk_turn(random, thinking=False)
    if chat.messages[0]["role"] != "system" and random.random() < 0.15:
        chat.messages.insert(0, system(random.choice(INSTRUCTIONS)))
    return chat


def draw_document_chat(random: Random, max_facts: int) -> Chat:
    """Draw a chat about a document of up to `max_facts` facts, most of them near the limit.

    A fact and the sentences around it take about 36 tokens.
    """
    num_facts = max(2, round(max_facts * random.betavariate(3, 1)))
    num_fillers = round(num_facts * random.uniform(0.4, 2.6))
    num_questions = random.randint(6, 8 + num_facts // 2)
    chat = recall_chat(random, num_facts, num_fillers, num_questions)
    if random.random() < 0.1 and not chat.thinking and chat.messages[0]["role"] == "system":
        chat.messages[1:1] = small_talk_turn(random, thinking=False)
    return chat
