"""Render and encode chats in tests, in this process."""

from __future__ import annotations

from quipu.actors.messages.prompts import ChatPrompt
from quipu.actors.text_workers.renderer import NO_TEMPLATE
from quipu.actors.tokenizer.chat_template import ChatTemplate, RenderedChat, TemplateError
from quipu.actors.tokenizer.encoder import EncodedChat
from quipu.actors.tokenizer.segment_cache import SegmentCache
from tests.vocabularies import Vocabulary


def render_chat(vocabulary: Vocabulary, chat: ChatPrompt) -> RenderedChat:
    if vocabulary.template is None:
        raise TemplateError(NO_TEMPLATE)
    return ChatTemplate(
        vocabulary.template.source, vocabulary.template.variables, vocabulary.template.tool_source
    ).render(chat)


def encode_chat(
    vocabulary: Vocabulary, chat: ChatPrompt, cache: SegmentCache | None = None, owner: str = ""
) -> EncodedChat:
    encoded = vocabulary.encoder.encode_chat(render_chat(vocabulary, chat), chat.marks, cache, owner)
    assert isinstance(encoded, EncodedChat)
    return encoded
