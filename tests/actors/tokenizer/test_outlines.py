"""Outlines of chats: which tokens the template made of each message, found without rendering the chat again."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from quipu.actors.messages.explanations import PromptOutline
from quipu.actors.messages.images import IMAGE_MARK
from quipu.actors.messages.prompts import ChatPart, ChatPrompt
from quipu.actors.tokenizer import outlines
from quipu.actors.tokenizer.outlines import outline_of, part_ends
from tests.runtimes import kept_encoder, kept_library, small_runtime
from tests.tiny import TINY

HEADERS = ("<s>", "<|im_start|>", "<|im_end|>")
LONG = "A quipu is a ledger of knotted cords, and what is tied into it stays. " * 6


def find_tokens(text: str, start: int, end: int) -> list[str]:
    found = sorted((text.find(token, at, end), token) for token in HEADERS for at in range(start, end))
    return [token for at, token in dict.fromkeys(found) if at >= 0]


def chat_of(*messages: tuple[str, str], **fields: Any) -> ChatPrompt:
    """Make a chat with one part for each message that says something."""
    return ChatPrompt(
        tuple({"role": role, "content": content} for role, content in messages),
        parts=tuple(
            ChatPart(index, None, role, index, len(content))
            for index, (role, content) in enumerate(messages)
            if content
        ),
        **fields,
    )


def rendered(*messages: tuple[str, str], header: str = "<|im_start|>", end: str = "<|im_end|>\n") -> str:
    shown = "".join(f"{header}{role}\n{content}{end}" for role, content in messages)
    return f"{shown}{header}assistant\n"


def pieces(text: str, ends: tuple[int, ...]) -> list[str]:
    return [text[start:end] for start, end in zip((0, *ends), (*ends, len(text)), strict=True)]


def test_messages_begin_with_the_templates_token() -> None:
    """If a token begins every message, a message includes what the template writes before and after its text."""
    messages = (("system", "Be brief."), ("user", "user"), ("assistant", "Hi."), ("user", "Hi."))
    text = rendered(*messages)
    ends = part_ends(chat_of(*messages), text, find_tokens)
    assert pieces(text, ends) == [*text.replace("<|im_start|>", "\0<|im_start|>").split("\0")[1:]]


def test_templates_without_such_a_token() -> None:
    """Without such a token, a message ends where its text ends, even if the template trims it."""
    messages = (("user", "Hello.\n\n"), ("assistant", " Hi."))
    text = rendered(("user", "Hello."), ("assistant", "Hi."), header="### ", end="\n")
    ends = part_ends(chat_of(*messages), text, find_tokens)
    assert pieces(text, ends) == ["### user\nHello.", "\n### assistant\nHi.", "\n### assistant\n"]


def test_parts_that_are_not_shown() -> None:
    """A part that the template leaves out is empty, and does not move the others."""
    chat = chat_of(("system", "Left out."), ("user", "Hello."), ("assistant", "Hi."))
    text = rendered(("user", "Hello."), ("assistant", "Hi."))
    ends = part_ends(chat, text, find_tokens)
    assert pieces(text, ends)[0] == "" and pieces(text, ends)[1] == "<|im_start|>user\nHello.<|im_end|>\n"
    outline = outline_of(chat.parts, ends, len(text))
    assert [(outline[i].message, outline[i].role) for i in range(len(outline))] == [
        (1, "user"),
        (2, "assistant"),
        (None, "assistant"),
    ]


def test_parts_of_one_message_and_calls() -> None:
    """Parts of one message follow one another; a call is where its name is."""
    call = {"function": {"name": "look_up", "arguments": {}}}
    chat = ChatPrompt(
        ({"role": "user", "content": "One.Two."}, {"role": "assistant", "content": "", "tool_calls": [call]}),
        parts=(
            ChatPart(0, 0, "user", 0, 4),
            ChatPart(0, 1, "user", 0, 8),
            ChatPart(1, None, "assistant", 1, 0, call=0),
        ),
    )
    text = rendered(("user", "One.Two."), ("assistant", '{"name": "look_up"}'))
    shown = pieces(text, part_ends(chat, text, find_tokens))
    assert shown[:2] == ["<|im_start|>user\nOne.", "Two.<|im_end|>\n"] and "look_up" in shown[2]


def test_chats_without_known_parts() -> None:
    """A chat none of whose parts is known or shown has no outline."""
    text = rendered(("user", "Hello."))
    assert part_ends(ChatPrompt(({"role": "user", "content": "Hello."},)), text, find_tokens) == ()
    assert part_ends(chat_of(("user", "Left out.")), text, find_tokens) == ()


def test_number_of_parts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat with too many parts has no outline."""
    monkeypatch.setattr(outlines, "MAX_PARTS", 2)
    messages = (("user", "a"), ("assistant", "b"), ("user", "c"))
    assert part_ends(chat_of(*messages), rendered(*messages), find_tokens) == ()
    assert len(outline_of((), (), 10)) == 0


@pytest.mark.parametrize("texts", [("Hi.", "Hello.", "And?"), (LONG, "Hi.", LONG + "b"), (LONG, LONG, "Hi.")])
async def test_outline_of_served_chats(autojump_clock: trio.abc.Clock, texts: tuple[str, ...]) -> None:
    """Each message has the tokens of its text and a few more, in order, whether the chat is cached or not."""
    messages = tuple((("system", "user", "assistant")[index], text) for index, text in enumerate(texts))
    chat = chat_of(*messages)
    seen: list[PromptOutline] = []
    async with small_runtime() as client:
        for _ in range(2):
            answer = await client.ask(chat, max_tokens=1)
            found = client.runtime.desk.explain(answer.record.request_id, None)
            assert found is not None
            seen.append(found.prompts[0].outline)
            assert seen[-1][-1].end == answer.record.prompt_tokens
    assert seen[0] == seen[1]
    (outline,) = seen[:1]
    assert [outline[i].message for i in range(len(outline))] == [0, 1, 2, None]
    encoder = kept_encoder(kept_library(TINY))
    for index, text in enumerate(texts):
        part = outline[index]
        num_tokens = len(encoder.encode_within_text(text))
        assert num_tokens <= part.end - part.start <= num_tokens + 20
    assert outline.part_at(outline[1].start - 1) == outline[0] and outline.part_at(outline[1].start) == outline[1]
    assert outline.start_of(1) == outline[1].start and outline.start_of(None) == 0


def test_images_are_parts() -> None:
    """A message that ends with an image reaches to the end of what stands for it, as do parts that are images."""
    content = f"Look:{IMAGE_MARK}{IMAGE_MARK} and?"
    parts = tuple(ChatPart(0, number, "user", 0, num_chars) for number, num_chars in enumerate((5, 6, 7, len(content))))
    chat = ChatPrompt(({"role": "user", "content": content},), parts=parts)
    text = rendered(("user", content.replace(IMAGE_MARK, "\n<image>")))
    ends = part_ends(chat, text, find_tokens, "\n<image>")
    assert pieces(text, ends)[1:4] == ["\n<image>", "\n<image>", " and?"]
    assert pieces(text, part_ends(chat, text, find_tokens))[1:3] == ["", ""], "nobody says what stands for one"
