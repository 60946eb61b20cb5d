"""Measures a model in training on chats that it is never trained on.

An answer is right if each of its tokens is the likeliest after those before it, as greedy decoding would write.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch

from .chat_encoder import ChatEncoder
from .text.arithmetic import arithmetic_chat
from .text.chat_mixture import HELD_OUT
from .text.chats import Chat
from .text.json_answers import json_chat
from .text.recall import recall_chat
from .text.small_talk import small_talk_chat
from .text.tool_chats import tool_chat
from .transformer import Transformer


def recall_of(num_facts: int) -> Callable[[Random], Chat]:
    return lambda random: recall_chat(random, num_facts, round(num_facts * 1.6), 8)


PROBES: dict[str, tuple[Callable[[Random], Chat], int]] = {
    "recall_6": (recall_of(6), 16), "recall_16": (recall_of(16), 12), "recall_40": (recall_of(40), 12),
    "tool": (tool_chat, 50), "json": (json_chat, 50), "arithmetic": (arithmetic_chat, 50),
    "small_talk": (small_talk_chat, 20),
}  # fmt: skip
"""Each probe's maker of chats, and how many of them are drawn."""


@torch.no_grad()
def measure(model: Transformer, encoder: ChatEncoder, device: torch.device) -> dict[str, float]:
    """Return, by probe, the share of answers that are right."""
    model.eval()
    shares = {}
    for name, (make, count) in PROBES.items():
        random = Random(HELD_OUT)
        right = [answer for _ in range(count) for answer in _answers(model, encoder, device, make(random))]
        shares[name] = sum(right) / len(right)
    model.train()
    return shares


def _answers(model: Transformer, encoder: ChatEncoder, device: torch.device, chat: Chat) -> list[bool]:
    ids, written = encoder.encode(chat)
    token_ids = torch.from_numpy(ids).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        likeliest = model.logits(model(token_ids[None]))[0].argmax(-1)
    same = (likeliest[:-1] == token_ids[1:]).cpu().numpy()
    answers, position = [], 0
    while position < len(ids):
        if not written[position]:
            position += 1
            continue
        start = position
        while position < len(ids) and written[position]:
            position += 1
        answers.append(bool(same[start - 1 : position - 1].all()))
    return answers
