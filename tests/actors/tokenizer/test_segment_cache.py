"""Turns that were tokenised before are not tokenised again, and nobody can tell from the ids."""

from __future__ import annotations

import json
import random
import sys
import timeit
from array import array
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from quipu.actors.messages.prompts import ChatPrompt, ContentMark
from quipu.actors.shared.checkpoint import DEMO
from quipu.actors.shared.tokenizers_library import Library
from quipu.actors.tokenizer.segment_cache import ENTRY_BYTES, SegmentCache
from quipu.actors.tokenizer.split_points import MIN_CHARACTERS, SplitPoints, find_split_points
from tests.actors.tokenizer.tokenizer_kinds import BASES, END, NESTED, START, TOKENS, demo, make, plain, save
from tests.chats import encode_chat, render_chat
from tests.runtimes import small_runtime
from tests.vocabularies import Vocabulary

TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant\n"
PARTS = [
    START,
    END,
    *NESTED,
    "\n",
    "\n\n",
    " ",
    "   ",
    "\t",
    "a",
    "It's",
    "Inca kept",
    "é",
    "e\u0301",
    "✓",
    "🦙",
    "12",
    "x",
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=30).map("".join)


@cache
def tokenizer_of(base: str, tokens: str) -> Tokenizer:
    return make(base, tokens)


@cache
def vocabulary_of(base: str, tokens: str) -> Vocabulary:
    with TemporaryDirectory() as folder:
        save(make(base, tokens), Path(folder), TEMPLATE)
        return Vocabulary(Path(folder))


def split_points_of(tokenizer: Tokenizer, min_characters: int = MIN_CHARACTERS) -> SplitPoints:
    return find_split_points(Library(tokenizer), json.loads(tokenizer.to_str()), min_characters)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@given(st.sampled_from(list(BASES)), st.sampled_from(list(TOKENS)), TEXTS, st.integers(1, 12))
@settings(max_examples=settings().max_examples * 5)
@example("metaspace first", "plain", f"a{START}a", 1)
@example("demo", "whitespace", f"a{START} \n\n  \n{END}\n\n{START}", 1)
def test_parts_have_the_ids_of_the_whole(base: str, tokens: str, text: str, min_characters: int) -> None:
    """Of every kind of tokenizer: the ids of the segments, joined, are those of the text."""
    tokenizer = tokenizer_of(base, tokens)
    starts = split_points_of(tokenizer, min_characters).starts(text)
    ends = [*starts[1:], len(text)]
    parts = [encode(tokenizer, text[start:end]) for start, end in zip(starts, ends, strict=True)]
    assert [token_id for part in parts for token_id in part] == encode(tokenizer, text)
    assert all(end - start >= min_characters for start, end in zip(starts[:-1], ends[:-1], strict=True))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_kind_is_cut(base: str, tokens: str) -> None:
    """None of these kinds is given up on: a text is cut before the token that begins a turn."""
    said = f"{START}user\nIt's a cord.{END}\n"
    starts = split_points_of(tokenizer_of(base, tokens), 5).starts(said * 3)
    assert {len(said), 2 * len(said)} <= set(starts)


@given(
    st.sampled_from(list(BASES)),
    st.sampled_from(list(TOKENS)),
    st.lists(st.tuples(TEXTS, st.integers(1, 400), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 3000),
)
@settings(max_examples=settings().max_examples * 3)
def test_a_growing_chat_has_the_ids_of_a_new_one(
    base: str, tokens: str, said: list[tuple[str, int, bool]], max_bytes: int
) -> None:
    """Turn after turn through one cache, however small: ids and marked places are those of the whole text."""
    vocabulary, kept = vocabulary_of(base, tokens), SegmentCache(max_bytes)
    messages: list[dict[str, str]] = []
    marks: list[ContentMark] = []
    for turn, (text, length, is_marked) in enumerate(said):
        content = (text * length)[:length]
        messages.append({"role": ("user", "assistant")[turn % 2], "content": content})
        if is_marked:
            marks.append(ContentMark(300, turn, len(content) // 2 if turn % 3 else len(content)))
        chat = ChatPrompt(tuple(messages), marks=tuple(marks))
        encoded = encode_chat(vocabulary, chat, kept, "someone")
        rendered = render_chat(vocabulary, chat)
        whole = vocabulary.tokenizer.encode(rendered.text, add_special_tokens=False)
        assert encoded.token_ids == whole.ids
        assert [b.position for b in encoded.breakpoints] == [
            tokens_before(whole, end, len(rendered.text)) for end in rendered.mark_ends
        ]
        assert kept.num_bytes <= max_bytes


def tokens_before(whole: Any, end: int, length: int) -> int:
    """As it was found in the whole text."""
    for char in range(end, length):
        token = whole.char_to_token(char)
        if token is not None:
            return int(token)
    return len(whole.ids) if end else 0


def test_only_the_new_turn_is_tokenised() -> None:
    """A second turn meets the ids of the first in the cache; another owner meets none."""
    vocabulary, kept = Vocabulary(DEMO), SegmentCache(1 << 20)
    words = " ".join(f"word{i}" for i in range(200))
    first = ({"role": "user", "content": words},)
    second = (*first, {"role": "assistant", "content": words[::-1]}, {"role": "user", "content": "Why?"})
    counting = CountingTokenizer(vocabulary.tokenizer)
    vocabulary.encoder = attrs.evolve(vocabulary.encoder, backend=Library(counting))
    encode_chat(vocabulary, ChatPrompt(first), kept, "one")
    assert counting.num_characters > len(words)
    counting.num_characters = 0
    encode_chat(vocabulary, ChatPrompt(second), kept, "one")
    assert len(words) < counting.num_characters < 1.2 * len(words)
    counting.num_characters = 0
    encode_chat(vocabulary, ChatPrompt(second), kept, "another")
    assert counting.num_characters > 2 * len(words)


class CountingTokenizer:
    """Says how much it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_characters = 0

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> object:
        self.num_characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def test_tokenizers_that_are_never_cut() -> None:
    """Whole words only, draws, tokens nested too deep: the text stays whole."""
    single_word = demo()
    single_word.add_tokens([AddedToken("end", single_word=True, normalized=False), *plain(START)])
    dropping = demo()
    dropping.model.dropout = 0.1
    spelling = demo()
    spelling.encode_special_tokens = True
    bare = Tokenizer(models.BPE())
    nested = demo()
    nested.add_tokens(plain(START, *("a" * length for length in range(1, 100))))
    for tokenizer in (single_word, dropping, spelling, bare, nested):
        assert split_points_of(tokenizer).starts(f"{START}<|im_start|>{'a' * 300}" * 3) == [0]


def test_the_cache_is_bounded_in_bytes() -> None:
    """It forgets the least recently used, and what it says it holds is about what it takes."""
    kept, drawn = SegmentCache(100_000), random.Random(3)
    texts = [str(i) + "x" * drawn.randrange(3000) for i in range(300)]
    for text in texts:
        kept.add("me", text, array("I", range(len(text))))
        kept.find("me", texts[0])
        assert kept.num_bytes <= 100_000
    assert kept.find("me", texts[0]) is not None
    assert kept.find("me", texts[1]) is None
    assert kept.find("you", texts[0]) is None
    held = [(text, ids) for text in texts if (ids := kept.find("me", text)) is not None]
    real = sum(sys.getsizeof(text) + sys.getsizeof(ids) + sys.getsizeof((1, 2)) for text, ids in held)
    assert real <= kept.num_bytes <= real + ENTRY_BYTES * len(held)
    kept.add("me", "y" * 200_000, array("I"))
    assert kept.find("me", "y" * 200_000) is None and len(kept) == len(held)


@given(st.sets(st.text("ab<|", min_size=1, max_size=5), min_size=1, max_size=12), st.text("ab<|x", max_size=60))
def test_the_longest_token_counts(tokens: set[str], text: str) -> None:
    """Of tokens that begin at one place the longest is found, and the next search begins behind it."""
    expected, at = [], 0
    while at < len(text):
        longest = max((token for token in tokens if text.startswith(token, at)), key=len, default="")
        if longest and at > 0:
            expected.append(at)
        at += len(longest) or 1
    # of neighbours closer than the least length the second is passed over: at 1 none is
    assert SplitPoints(tokens, (), 1).starts(text) == [0, *expected]


def test_thousands_of_tokens() -> None:
    """A vocabulary with as many as Gemma's is searched as fast as one with few: the pattern is a tree, not a list."""
    tokens = [START, END, *(f"<unused{i}>" for i in range(6000)), *("\n" * i for i in range(2, 32))]
    text = ("<b>a line of markup</b>\n" * 40 + END) * 50
    split_points = SplitPoints([START, END], tokens)
    assert len(split_points.starts(text)) == 51
    few, many = (
        min(timeit.repeat(lambda points=points: points.starts(text), number=1, repeat=5))
        for points in (SplitPoints([START, END], []), split_points)
    )
    assert many < 500 * few  # a list: 25,000


def test_split_points_of_one_text_are_those_of_a_longer_one() -> None:
    """What is appended moves no cut, so the segments before are found again."""
    split_points = SplitPoints([START, END], [])
    text = f"{START}{'a' * 300}{END}\n" * 4
    assert split_points.starts(text) == split_points.starts(text + "more" + text)[: len(split_points.starts(text))]


async def test_tenants_and_salts_have_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two domains, or two salts of one, neither is served faster for what the other has asked."""
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
