"""Writes a checkpoint in the Hugging Face layout: weights in bfloat16, config, tokenizer, chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .chat_encoder import CHECKPOINT, MARKERS, SPECIAL_TOKENS, ChatEncoder
from .transformer import Shape

MAX_POSITIONS = 32_768
"""Longer than its training rows, so that requests of agents are accepted."""


def save_checkpoint(folder: Path, shape: Shape, weights: dict[str, Tensor]) -> None:
    """Write the checkpoint of the model with `weights`, by the names of `Transformer`'s parameters, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = ChatEncoder()
    ids = {token: encoder.token_id(token) for token in (*SPECIAL_TOKENS, *MARKERS)}
    end, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    documents = {
        "config.json": shape.config(MAX_POSITIONS, end, pad),
        "generation_config.json": {
            "do_sample": True, "temperature": 0.3, "top_p": 0.9, "eos_token_id": [end, pad], "pad_token_id": pad,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_POSITIONS, "bos_token": None,
            "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {
                str(index): {
                    "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                    "special": token in SPECIAL_TOKENS,
                }
                for token, index in ids.items()
            },
        },
    }  # fmt: skip
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n")
    for name in ("tokenizer.json", "chat_template.jinja"):
        if folder.resolve() != CHECKPOINT.resolve():
            shutil.copyfile(CHECKPOINT / name, folder / name)
    tensors = {f"model.{name}": value.detach().cpu().to(torch.bfloat16).contiguous() for name, value in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it readable by its owner alone
