"""The segment cache: earlier turns are not tokenized again, and the ids are the same."""

from __future__ import annotations

import random
import sys
from array import array
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quipu.actors.messages.prompts import ChatPrompt, ContentMark
from quipu.actors.shared.tokenizers_library import Library
from quipu.actors.tokenizer.segment_cache import ENTRY_BYTES, SegmentCache
from tests.actors.tokenizer.tokenizer_kinds import BASES, TEXTS, TOKENS, make, save
from tests.chats import encode_chat, render_chat
from tests.runtimes import small_runtime
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant\n"


@cache
def vocabulary_of(base: str, tokens: str) -> Vocabulary:
    with TemporaryDirectory() as folder:
        save(make(base, tokens), Path(folder), TEMPLATE)
        return Vocabulary(Path(folder))


@given(
    st.sampled_from(list(BASES)),
    st.sampled_from(list(TOKENS)),
    st.lists(st.tuples(TEXTS, st.integers(1, 400), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 3000),
)
@settings(max_examples=settings().max_examples * 3)
def test_growing_chat_has_the_ids_of_a_new_one(
    base: str, tokens: str, turns: list[tuple[str, int, bool]], max_bytes: int
) -> None:
    """Turn after turn, with a cache of any size, ids and breakpoints are those of the whole text."""
    vocabulary, segments = vocabulary_of(base, tokens), SegmentCache(max_bytes)
    messages: list[dict[str, str]] = []
    marks: list[ContentMark] = []
    for turn, (text, length, is_marked) in enumerate(turns):
        content = (text * length)[:length]
        messages.append({"role": ("user", "assistant")[turn % 2], "content": content})
        if is_marked:
            marks.append(ContentMark(300, turn, len(content) // 2 if turn % 3 else len(content)))
        chat = ChatPrompt(tuple(messages), marks=tuple(marks))
        encoded = encode_chat(vocabulary, chat, segments, "someone")
        rendered = render_chat(vocabulary, chat)
        whole = vocabulary.tokenizer.encode(rendered.text, add_special_tokens=False)
        assert encoded.token_ids == whole.ids
        assert [b.position for b in encoded.breakpoints] == [
            tokens_before(whole, end, len(rendered.text)) for end in rendered.mark_ends
        ]
        assert segments.num_bytes <= max_bytes


def tokens_before(whole: Any, end: int, length: int) -> int:
    """Return the tokens before `end`, from the encoding of the whole text."""
    for char in range(end, length):
        token = whole.char_to_token(char)
        if token is not None:
            return int(token)
    return len(whole.ids) if end else 0


def test_only_the_new_turn_is_tokenized() -> None:
    """A second turn finds the ids of the first in the cache; another owner finds none."""
    vocabulary, segments = Vocabulary(TINY), SegmentCache(1 << 20)
    words = " ".join(f"word{i}" for i in range(200))
    first = ({"role": "user", "content": words},)
    second = (*first, {"role": "assistant", "content": words[::-1]}, {"role": "user", "content": "Why?"})
    counting = CountingTokenizer(vocabulary.tokenizer)
    vocabulary.encoder = attrs.evolve(vocabulary.encoder, backend=Library(counting))
    encode_chat(vocabulary, ChatPrompt(first), segments, "one")
    assert counting.num_characters > len(words)
    counting.num_characters = 0
    encode_chat(vocabulary, ChatPrompt(second), segments, "one")
    assert len(words) < counting.num_characters < 1.2 * len(words)
    counting.num_characters = 0
    encode_chat(vocabulary, ChatPrompt(second), segments, "another")
    assert counting.num_characters > 2 * len(words)


class CountingTokenizer:
    """Count the characters it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_characters = 0

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> object:
        self.num_characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def test_cache_is_bounded_in_bytes() -> None:
    """The cache evicts the least recently used entries, and reports approximately the memory that it uses."""
    segments, drawn = SegmentCache(100_000), random.Random(3)
    texts = [str(i) + "x" * drawn.randrange(3000) for i in range(300)]
    for text in texts:
        segments.add("me", text, array("I", range(len(text))))
        segments.find("me", texts[0])
        assert segments.num_bytes <= 100_000
    assert segments.find("me", texts[0]) is not None
    assert segments.find("me", texts[1]) is None
    assert segments.find("you", texts[0]) is None
    held = [(text, ids) for text in texts if (ids := segments.find("me", text)) is not None]
    real = sum(sys.getsizeof(text) + sys.getsizeof(ids) + sys.getsizeof((1, 2)) for text, ids in held)
    assert real <= segments.num_bytes <= real + ENTRY_BYTES * len(held)
    segments.add("me", "y" * 200_000, array("I"))
    assert segments.find("me", "y" * 200_000) is None and len(segments) == len(held)


async def test_tenants_and_salts_share_no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request finds no segments of another domain or salt."""
    found: list[bool] = []

    class Watched(SegmentCache):
        def find(self, owner: str, text: str) -> array[int] | None:
            ids = super().find(owner, text)
            found.append(ids is not None)
            return ids

    monkeypatch.setattr("quipu.actors.wiring.SegmentCache", Watched)
    chat = ChatPrompt(({"role": "user", "content": "a cord " * 60},))
    async with small_runtime() as client:
        for domain, salt in (("a", ""), ("b", ""), ("a", "b"), ("ab", ""), ("a", "")):
            assert (await client.ask(chat, domain=domain, cache_salt=salt)).error is None
    assert found == [False, False, False, False, True]
