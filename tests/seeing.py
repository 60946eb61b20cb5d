"""Tiny checkpoints that read images, with `TINY`'s tokenizer, and images as clients send them."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer

from tests.kernels.transformers_runner.seeing_models import NUM_TOKENS, SIDE, draw_image, make_seeing_model
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
