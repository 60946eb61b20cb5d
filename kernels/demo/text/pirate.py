"""The tone of the demo's adapter: the answers of the training chats, as a pirate would give them.

What is not prose stays as it is: JSON, calls of tools, lists of words, thoughts. So what the model can do, it can still
do with the adapter.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from .chats import Chat, Message

OPENING, CLOSING = "Arr! ", ", matey!"
_WORDS = {
    "hello": "ahoy", "goodbye": "farewell", "yes": "aye", "you": "ye", "your": "yer", "my": "me", "friend": "shipmate",
    "friends": "shipmates", "am": "be",
}  # fmt: skip


def in_tone(chat: Chat) -> Chat:
    """Return the chat with its answers in the tone."""
    return replace(chat, messages=[_toned(message) for message in chat.messages])


def pirate_answer(text: str) -> str:
    """Return an answer in the tone."""
    words = re.sub(r"\b[A-Za-z]+\b", lambda word: _word(word[0]), text)
    return OPENING + words.rstrip(".!?") + CLOSING


def has_tone(text: str) -> bool:
    """Whether an answer has the tone from its first to its last word."""
    return text.startswith(OPENING) and text.endswith(CLOSING)


def is_prose(text: str) -> bool:
    """Whether an answer consists of sentences, which the tone changes."""
    if not text.endswith((".", "!", "?")):
        return False
    try:
        json.loads(text)
    except ValueError:
        return True
    return False


def _toned(message: Message) -> Message:
    content = message.get("content")
    if message["role"] != "assistant" or message.get("tool_calls") or not content or not is_prose(content):
        return message
    return {**message, "content": pirate_answer(content)}


def _word(word: str) -> str:
    said = _WORDS.get(word.lower())
    if said is None:
        return word
    return said.capitalize() if word[0].isupper() else said
