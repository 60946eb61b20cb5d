"""Tiny checkpoints that read images, with `TINY`'s tokenizer, and images as clients send them."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import attrs
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForImageTextToText

from tests.kernels.transformers_runner.seeing_models import (
    NUM_TOKENS,
    SIDE,
    draw_image,
    make_seeing_model,
    pixel_values,
    told_of_images,
)
from tests.tiny import TINY

VOCAB_SIZE, PLACEHOLDER = 4104, 4096
TOKENS = {
    "llava": {"image_token": "<image>"},
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
}
"""The names and texts of a family's tokens for images; the first is the placeholder's, the last is reserved."""
WRITTEN = {"llava": "<image>", "gemma3": "<start_of_image>"}
"""What the chat template writes for an image."""
SHOWN = {"llava": "<image>", "gemma3": "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"}
"""What is tokenized in its place."""
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- for part in message.content %}{{- 'WRITTEN' if part.type == 'image' else part.text }}{%- endfor %}
{{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_seeing_checkpoint(folder: Path, family: str = "llava") -> Path:
    """Make a checkpoint that can be served."""
    make_seeing_model(folder, VOCAB_SIZE, PLACEHOLDER, family)
    tokenizer, texts = Tokenizer.from_file(str(TINY / "tokenizer.json")), TOKENS[family]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in texts.values()])
    assert tokenizer.token_to_id(texts["image_token"]) == PLACEHOLDER
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((TINY / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "extra_special_tokens": texts}))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": NUM_TOKENS}))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("WRITTEN", WRITTEN[family]))
    return folder


def data_url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "png")
    return file.getvalue()


def drawn_url(seed: int) -> str:
    """Return an image that needs no scaling, of pixels that `draw_image` draws."""
    return data_url(png(Image.frombytes("RGB", (SIDE, SIDE), draw_image(seed).pixels)))


def seen(url: str) -> dict[str, Any]:
    """Return the part of a message that holds an image."""
    return {"type": "image_url", "image_url": {"url": url}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat_body(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a chat of one message."""
    body: dict[str, Any] = json.loads(json.dumps({"messages": [{"role": "user", "content": list(parts)}], **fields}))
    return body


@attrs.frozen
class Checkpoint:
    """A checkpoint that `make_seeing_checkpoint` has made."""

    folder: Path
    family: str


def prompt_of(model: Checkpoint, *texts: str) -> list[int]:
    """Return the tokens of a chat with an image between each two texts."""
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    text = f"<|im_start|>user\n{SHOWN[model.family].join(texts)}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return [token for found in ids for token in ([found] * NUM_TOKENS if found == PLACEHOLDER else [found])]


@torch.inference_mode()
def greedy(model: Checkpoint, tokens: list[int], *seeds: int) -> str:
    """Return the text that transformers generates."""
    theirs = AutoModelForImageTextToText.from_pretrained(model.folder, dtype=torch.float32)
    ids = theirs.generate(
        input_ids=torch.tensor([tokens]), pixel_values=torch.cat([pixel_values(draw_image(seed)) for seed in seeds]),
        max_new_tokens=12, min_new_tokens=12, do_sample=False, suppress_tokens=[2], pad_token_id=0,
        **told_of_images(model.family, tokens, PLACEHOLDER),
    )  # fmt: skip
    return str(Tokenizer.from_file(str(model.folder / "tokenizer.json")).decode(ids[0][len(tokens) :].tolist()))


def counts(answer: dict[str, Any]) -> tuple[int, int, int]:
    """Return an answer's prompt tokens, those that were cached, and those that stand for images."""
    usage = answer["usage"]
    details = usage["prompt_tokens_details"]
    return usage["prompt_tokens"], details["cached_tokens"], details["image_tokens"]
