"""Which tokens of a prompt come from which part of which message, for each API and several templates."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from quipu.actors.messages.images import IMAGE_MARK
from quipu.actors.messages.prompts import ChatPart, ChatPrompt, PartSpan
from quipu.actors.shared.tokenizers_library import load_library
from quipu.actors.tokenizer.chat_template import ChatTemplate
from quipu.actors.tokenizer.encoder import EncodedChat, load_encoder
from quipu.actors.tokenizer.message_spans import span_at, spans_of
from tests.tiny import TINY

from .test_chat_template import HISTORY, PLAIN_TEMPLATE, QWEN_LIKE, message, tool

PARTS = (
    ChatPart(None, None, "system", 0, 9),
    ChatPart(0, 0, "user", 1, 4),
    ChatPart(0, 1, "user", 1, 8),
    ChatPart(1, 0, "assistant", 2, 11),
    ChatPart(1, 1, "assistant", 2, 11, 0),
    ChatPart(2, None, "tool", 3, 5),
    ChatPart(3, None, "user", 4, 4),
)
CHAT = ChatPrompt(HISTORY, parts=PARTS, locates_parts=True)

_SHOW = "{{ '[image]' if part.type == 'image' else part.text }}"
IN_PLACE = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message.content %}"
    + _SHOW
    + "{% endfor %}[end]{% endfor %}[assistant]"
)
FIRST = IN_PLACE.replace(" in message.content", " in message.content | selectattr('type', 'equalto', 'image')").replace(
    "[end]", "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}[end]"
)
"""Templates that show images where they are, and before the text of their message, as LLaVA's own."""


def pieces(source: str, chat: ChatPrompt) -> list[tuple[Any, ...]]:
    """Return each span's message, part, role and text."""
    rendered = ChatTemplate(source, {}).render(chat)
    assert rendered.text == ChatTemplate(source, {}).render(attrs.evolve(chat, locates_parts=False)).text
    spans = spans_of(chat, rendered.part_ends, len(rendered.text))
    assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
    assert (spans[0].start, spans[-1].end) == (0, len(rendered.text))
    return [(span.message, span.part, span.role, rendered.text[span.start : span.end]) for span in spans]


def test_each_part_ends_where_its_text_does() -> None:
    """Two parts of one content have separate spans, and so do a call and the text before it."""
    assert pieces(QWEN_LIKE, CHAT) == [
        (None, None, "system", "[system]Be brief."),
        (0, 0, "user", "[end][user]Weat"),
        (0, 1, "user", "her?"),
        (1, 0, "assistant", "[end][assistant](Which town?)Let me see."),
        (1, 1, "assistant", '{weather {"town": "Cusco'),
        (2, None, "tool", '"}}[end][tool]Rain.'),
        (3, None, "user", "[end][user]And?"),
        (None, None, "assistant", "[end][assistant]"),
    ]


def test_tools_are_a_span_of_their_own() -> None:
    """The definitions of tools have their own span, before the first message."""
    chat = ChatPrompt(
        (message("user", "Hello"),), tools=(tool("add"),), parts=(ChatPart(0, None, "user", 0, 5),), locates_parts=True
    )
    found = pieces(QWEN_LIKE, chat)
    assert [piece[:3] for piece in found] == [(None, None, "tools"), (0, None, "user"), (None, None, "assistant")]
    assert found[0][3].endswith('"properties": {}}}') and found[1][3].endswith("[user]Hello")


def test_what_a_template_trims_or_leaves_out_moves_no_other_part() -> None:
    """Trimmed whitespace, a blank text and a message that is not shown do not move other parts."""
    messages = (message("user", "  padded \n"), message("assistant", " "), message("user", "last"))
    parts = tuple(ChatPart(i, None, m["role"], i, len(m["content"])) for i, m in enumerate(messages))
    chat = ChatPrompt(messages, parts=parts, locates_parts=True)
    assert pieces(QWEN_LIKE, chat) == [
        (0, None, "user", "[user]padded"),
        (2, None, "user", "[end][assistant][end][user]last"),
        (None, None, "assistant", "[end][assistant]"),
    ]
    only_last = "{{ messages[-1].content }}{{ '.' }}"
    assert pieces(only_last, chat) == [(2, None, "user", "last"), (None, None, "assistant", ".")]


def test_a_template_that_looks_at_endings_is_searched() -> None:
    """If markers would change what a template prints, its parts are searched for in their order."""
    source = "{% for m in messages %}<{{ 'ok' if m.content.endswith('a') else m.content }}{{ m.content }}>{% endfor %}"
    messages = (message("user", "lima"), message("assistant", "puno"), message("user", "lima"))
    parts = tuple(ChatPart(i, None, m["role"], i, 4) for i, m in enumerate(messages))
    found = pieces(source, ChatPrompt(messages, parts=parts, locates_parts=True))
    assert [piece[0] for piece in found] == [0, 1, 2, None]
    assert [piece[3] for piece in found] == ["<oklima", "><puno", "puno><oklima", ">"]


@pytest.mark.parametrize("number", ["0", "9", "9" * 5000])
def test_texts_that_look_like_markers(number: str) -> None:
    """A client's text is text, also where it has the characters that parts are found by."""
    content = f"so \ufdd2{number}\ufdd3 it is"
    chat = ChatPrompt((message("user", content),), parts=(ChatPart(0, None, "user", 0, len(content)),))
    (found, _) = pieces(QWEN_LIKE, attrs.evolve(chat, locates_parts=True))
    assert found == (0, None, "user", f"[user]{content}")


@pytest.mark.parametrize("num_messages", [1, 40])
def test_tokens_are_those_of_the_prompt(num_messages: int) -> None:
    """Spans in tokens decode to the same pieces as those in characters, whether or not the text is split."""
    library = load_library(TINY)
    encoder = load_encoder(library)
    messages = tuple(message("user", f"Message {i} says {'hello ' * 30}") for i in range(num_messages))
    parts = tuple(ChatPart(i, None, "user", i, len(m["content"])) for i, m in enumerate(messages))
    chat = ChatPrompt(messages, parts=parts, locates_parts=True)
    rendered = ChatTemplate(PLAIN_TEMPLATE, {}).render(chat)
    encoded = encoder.encode_chat(rendered, outline=attrs.evolve(chat, messages=()))
    assert isinstance(encoded, EncodedChat)
    spans = encoded.spans
    assert spans[-1].end == len(encoded.token_ids) and len(spans) == num_messages + 1
    for span in spans[:-1]:
        assert span.message is not None
        text = library.decode(encoded.token_ids[span.start : span.end], skip_special_tokens=False)
        assert text.rstrip().endswith(messages[span.message]["content"].rstrip())


def test_a_position_is_found() -> None:
    """A token belongs to the span that contains its position, or to none."""
    spans = (PartSpan(None, None, "tools", 0, 4), PartSpan(0, None, "user", 4, 9))
    assert [span_at(spans, token) for token in (0, 3, 4, 8, 9)] == [spans[0], spans[0], spans[1], spans[1], None]
    assert span_at((), 0) is None


@pytest.mark.parametrize(("source", "shown"), [(IN_PLACE, "Look: [image] and"), (FIRST, "[image]Look:  and")])
def test_images_are_spans(source: str, shown: str) -> None:
    """An image is a span of its own where the template shows it in its place; in any case the message's ends are."""
    content = f"Look: {IMAGE_MARK} and"
    parts = tuple(ChatPart(0, number, "user", 0, num_chars) for number, num_chars in enumerate((6, 7, len(content))))
    chat = ChatPrompt(({"role": "user", "content": content},), parts=parts, locates_parts=True)
    template = ChatTemplate(source, {}, lists_parts=True)
    rendered = template.render(chat)
    assert rendered.text == f"[user]{shown}[end][assistant]"
    spans = spans_of(chat, rendered.part_ends, len(rendered.text))
    told = [(span.message, span.part, rendered.text[span.start : span.end]) for span in spans]
    if source == IN_PLACE:
        wanted = [(0, 0, "[user]Look:"), (0, 1, " [image]"), (0, 2, " and")]
    else:
        wanted = [(0, 0, "[user][image]Look:"), (0, 1, " "), (0, 2, " and")]
    assert told == [*wanted, (None, None, "[end][assistant]")]
