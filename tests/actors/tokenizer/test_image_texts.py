"""Chats with images of a model that wants texts around them: the ids are those of transformers' processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import Gemma3ImageProcessorPil, Gemma3Processor, PreTrainedTokenizerFast

from quipu.actors.messages.images import IMAGE_MARK, ImageFormat, PromptImage
from quipu.actors.messages.prompts import CacheTtl, ChatPrompt, ContentMark
from quipu.actors.shared.image_files import read_image_format
from quipu.actors.shared.tokenizers_library import load_library
from quipu.actors.tokenizer.chat_template import ChatTemplate, RenderedChat, TemplateError
from quipu.actors.tokenizer.encoder import EncodedChat, load_encoder
from quipu.actors.tokenizer.image_placeholders import with_images, with_texts
from quipu.actors.tokenizer.template_source import read_template
from tests.kernels.transformers_runner.seeing_models import NUM_TOKENS, SIDE, draw_image
from tests.seeing import TOKENS, make_seeing_checkpoint

CONTENTS = [
    [f"{IMAGE_MARK}What is this?"],
    [f"Look:{IMAGE_MARK}"],
    [f"Look:\n\n{IMAGE_MARK}\n\n\nand\n{IMAGE_MARK} \n"],
    [f"{IMAGE_MARK}{IMAGE_MARK}"],
    ["One.", "Two.", f" three {IMAGE_MARK}", "Four.", f"{IMAGE_MARK}\n", "", f"a{IMAGE_MARK}b{IMAGE_MARK}c"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing"), "gemma3")


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    template = (folder / "chat_template.jinja").read_text()
    return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=NUM_TOKENS)


def parts_of(content: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for at, text in enumerate(content.split(IMAGE_MARK)):
        parts += [{"type": "image", "image": Image.new("RGB", (SIDE, SIDE))}] if at else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts or [{"type": "text", "text": ""}]


def format_of(folder: Path) -> ImageFormat:
    found = read_image_format(folder, "fake")
    assert found is not None and found.texts is not None
    return found


def encode(folder: Path, chat: ChatPrompt, images: list[PromptImage]) -> EncodedChat:
    """Encode a chat as the prompt encoder does."""
    source, wanted = read_template(folder, lists_parts=True), format_of(folder)
    assert source is not None and wanted.texts is not None
    rendered = ChatTemplate(source.source, source.variables, lists_parts=True).render(chat)
    shown = with_texts(rendered, len(images), wanted.texts) if images else rendered
    encoded = load_encoder(load_library(folder)).encode_chat(shown, chat.marks)
    assert isinstance(encoded, EncodedChat)
    return with_images(encoded, images, wanted.placeholder) if images else encoded


@pytest.mark.parametrize("contents", CONTENTS)
def test_ids_of_the_processor(folder: Path, processor: Any, contents: list[str]) -> None:
    """The ids are those that the processor makes, and the images are where it says."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    images = [draw_image(seed) for seed in range("".join(contents).count(IMAGE_MARK))]
    encoded = encode(folder, ChatPrompt(tuple(messages)), images)
    theirs = processor.apply_chat_template(
        [{**message, "content": parts_of(message["content"])} for message in messages],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"add_special_tokens": False},
    )
    assert encoded.token_ids == theirs["input_ids"][0]
    kinds = [0] * len(encoded.token_ids)
    for image in encoded.images:
        kinds[image.start : image.end] = [1] * image.num_tokens
    assert kinds == list(theirs["token_type_ids"][0])


def test_breakpoints(folder: Path) -> None:
    """A mark before an image is before its first token, and one behind it is behind the text that ends it."""
    content = f"Look at this, then at that:{IMAGE_MARK}and name both."
    end = content.index(IMAGE_MARK)
    marks = tuple(ContentMark(CacheTtl.FIVE_MINUTES, 0, at) for at in (end, end + 1, len(content)))
    encoded = encode(folder, ChatPrompt(({"role": "user", "content": content},), marks=marks), [draw_image(1)])
    (image,) = encoded.images
    before, behind, last = (found.position for found in encoded.breakpoints)
    assert before < image.start < image.end < behind < last < len(encoded.token_ids)


@pytest.mark.parametrize("text", [*TOKENS["gemma3"].values()])
def test_texts_of_clients(folder: Path, text: str) -> None:
    """What a model wants around an image must not stand in a message beside one; without images it is text."""
    with pytest.raises(TemplateError, match="has 1 images, but its prompt has 2 placeholders"):
        encode(folder, ChatPrompt(({"role": "user", "content": f"{text}{IMAGE_MARK}"},)), [draw_image(1)])
    assert encode(folder, ChatPrompt(({"role": "user", "content": text},)), []).images == ()


def test_positions_in_texts(folder: Path) -> None:
    """Every position of a rendered chat moves with the character at which it stands."""
    texts = format_of(folder).texts
    assert texts is not None
    text = f"ab{texts.written}cd{texts.written}"
    places = tuple(range(len(text) + 1))
    moved = with_texts(RenderedChat(text, places, places), 2, texts)
    assert moved.mark_ends == moved.part_ends
    assert moved.text == f"ab{texts.replacement}cd{texts.replacement}"
    first, second = len("ab"), len(f"ab{texts.written}cd")
    assert [moved.mark_ends[at] for at in (0, first, second)] == [0, first, moved.text.index("cd") + 2]
    assert moved.mark_ends[-1] == len(moved.text)
